/** Numbers, times and texts as people read them. */

export type Known = number | null | undefined;

export function formatNumber(value: Known, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return grouped(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2));
  if (size >= 1000) return grouped(Math.round(value * 10) / 10);
  const text = value.toPrecision(digits);
  if (Math.abs(Number(text)) >= 1000) return grouped(Number(text));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function grouped(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

export function formatShare(value: Known): string {
  return value === null || value === undefined ? "-" : `${formatNumber(value * 100, 3)}%`;
}

export function formatSeconds(value: Known): string {
  if (value === null || value === undefined) return "-";
  // The unit is that of what is shown: 0.9996 s are 1 s, not 1,000 ms.
  const size = Math.abs(value) < 120 ? Math.abs(Number(value.toPrecision(3))) : Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${formatNumber(value * 1e6, 3)} us`;
  if (size < 1) return `${formatNumber(value * 1e3, 3)} ms`;
  if (size < 120) return `${formatNumber(value, 3)} s`;
  const minutes = Math.floor(size / 60);
  const sign = value < 0 ? "-" : "";
  if (minutes < 60) return `${sign}${minutes} min ${Math.floor(size % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${sign}${hours} h ${minutes % 60} min`;
  return `${sign}${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function formatBytes(value: Known): string {
  if (value === null || value === undefined) return "-";
  let size = value;
  let unit = 0;
  while (Math.round(Math.abs(size) * 10) / 10 >= 1024 && unit < BYTES.length - 1) {
    size /= 1024;
    unit++;
  }
  return `${formatNumber(size)} ${BYTES[unit] ?? ""}`;
}

/** Whether a meter or metric is a share, which is at most 1. */
export function isShare(name: string): boolean {
  return /(_share|fraction)$/.test(name);
}

/** A value of a meter or metric by the unit that its name ends with. */
export function formatByName(name: string, value: Known): string {
  if (/_bytes(_per_s)?$/.test(name)) return formatBytes(value) + (name.endsWith("_per_s") ? "/s" : "");
  if (isShare(name)) return formatShare(value);
  if (/_s$/.test(name) && !/_per_s$/.test(name)) return formatSeconds(value);
  return formatNumber(value);
}

const pad = (value: number, width = 2): string => String(Math.floor(value)).padStart(width, "0");

/** A moment on the reader's own clock: 14:03:05, with as many digits as `step_s` needs. */
export function formatClock(time_s: number, step_s = 1): string {
  const date = new Date(time_s * 1000);
  const text = `${pad(date.getHours())}:${pad(date.getMinutes())}`;
  if (step_s >= 60) return text;
  const seconds = `${text}:${pad(date.getSeconds())}`;
  if (step_s >= 1) return seconds;
  const digits = step_s >= 0.1 ? 1 : step_s >= 0.01 ? 2 : 3;
  const part = Math.floor(((time_s % 1) + 1) % 1 * 10 ** digits + 1e-6);
  return `${seconds}.${pad(part, digits)}`;
}

function formatDay(time_s: number): string {
  const date = new Date(time_s * 1000);
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
}

export function formatDate(time_s: Known): string {
  if (time_s === null || time_s === undefined) return "-";
  return `${formatDay(time_s)} ${formatClock(time_s)}`;
}

/** A moment below an axis whose marks are `step_s` apart: midnight is the day that begins. */
export function formatTick(time_s: number, step_s: number): string {
  const clock = formatClock(time_s, step_s);
  return step_s >= 3600 && clock === "00:00" ? formatDay(time_s).slice(5) : clock;
}

/** The day and the clock of both ends, and the day once if it is the same. */
export function formatWindow(from_s: number, to_s: number): string {
  const step_s = to_s - from_s < 10 ? 0.001 : 1;
  const [first, last] = [formatDay(from_s), formatDay(to_s)];
  const end = formatClock(to_s, step_s);
  return `${first} ${formatClock(from_s, step_s)} to ${first === last ? end : `${last} ${end}`}`;
}

/** A moment that is given as ISO 8601. */
export function formatIso(text: string | null | undefined): string {
  const time = text ? Date.parse(text) : Number.NaN;
  return Number.isNaN(time) ? "-" : formatDate(time / 1000);
}

export function formatAgo(time_s: Known): string {
  if (time_s === null || time_s === undefined) return "-";
  const past = Date.now() / 1000 - time_s;
  return past < 5 ? "just now" : `${formatSeconds(Math.round(past))} ago`;
}

export function formatCell(value: unknown, name = ""): string {
  if (value === null || value === undefined || value === "") return "-";
  if (typeof value === "number") return formatByName(name, value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "string" ? value : JSON.stringify(value);
}

export function plural(count: Known, one: string, many = `${one}s`): string {
  return `${formatNumber(count)} ${count === 1 ? one : many}`;
}

/** The name of a run, and its key where that differs: several runs may have the same name. */
export function nameOfRun({ name, key }: { name: string; key: string }): string {
  return !name || name === key ? key : `${name} (${key})`;
}

/** A word of a command as a shell takes it, whatever it holds. */
export function quotedWord(word: string): string {
  const named = word.startsWith("-") ? `./${word}` : word;
  return /^[\w@%+=:,./-]+$/.test(named) ? named : `'${named.replaceAll("'", "'\"'\"'")}'`;
}
