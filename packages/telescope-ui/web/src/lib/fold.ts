/** Lines of logs that say the same over and over, as one with a count; and whose a line is. */

export interface LogLine {
  time_s: number | null;
  level: string;
  component: string;
  source: string;
  life: number | null;
  message: string;
}

export interface Fold {
  line: LogLine;
  count: number;
  /** When it was said last. */
  last_s: number | null;
}

/** Lines that may stand between two that say the same. */
const BETWEEN = 12;
/** Programs begin their lines with the time, which is not what they say. */
const TIMES = /\b(?:\d{4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?|\b\d\d:\d\d:\d\d(?:[.,]\d+)?/g;

/** Return `lines`, oldest first; one that says the same as one a few lines before is counted there. */
export function folded(lines: readonly LogLine[]): Fold[] {
  const found: Fold[] = [];
  const places = new Map<string, number>();
  for (const line of lines) {
    const said = [line.level, line.component, line.source, line.life, line.message.replace(TIMES, "")].join("\u0000");
    const at = places.get(said);
    const before = at === undefined || found.length - at > BETWEEN ? undefined : found[at];
    if (before) {
      before.count++;
      before.last_s = line.time_s;
    } else {
      places.set(said, found.length);
      found.push({ line, count: 1, last_s: line.time_s });
    }
  }
  return found;
}

/** Which process wrote a line: `inference-0`, `trainer rank 0`, `driver`. */
export function processOf({ component, source }: LogLine): string {
  if (!source || source === component) return component;
  return /^\d+$/.test(source) ? `${component}-${source}` : `${component} ${source}`;
}
