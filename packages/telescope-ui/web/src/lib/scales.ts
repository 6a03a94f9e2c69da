/** Axes: from values to pixels, and where their labels stand. */

export interface Scale {
  from: number;
  to: number;
  /** Pixel of a value. */
  (value: number): number;
  /** Value of a pixel. */
  invert: (pixel: number) => number;
}

export function linear(from: number, to: number, start: number, end: number): Scale {
  const width = to - from || 1;
  const scale = ((value: number) => start + ((value - from) / width) * (end - start)) as Scale;
  scale.from = from;
  scale.to = to;
  scale.invert = (pixel) => from + ((pixel - start) / (end - start || 1)) * width;
  return scale;
}

/** Powers of ten are equally far from each other; 0 and less are nowhere. */
export function logarithmic(from: number, to: number, start: number, end: number): Scale {
  const inner = linear(Math.log10(from), Math.log10(to), start, end);
  const scale = ((value: number) => (value > 0 ? inner(Math.log10(value)) : NaN)) as Scale;
  scale.from = from;
  scale.to = to;
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  return scale;
}

/** Powers of ten, and 2 and 5 times those where there are few; round steps within one power. */
export function logTicks(from: number, to: number, count: number): number[] {
  const powers = Math.log10(to / from);
  if (powers < 1) return ticks(from, to, count);
  const found: number[] = [];
  const every = Math.ceil(powers / (2 * count));
  for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power += every) {
    for (const part of powers < count / 2 ? [1, 2, 5] : [1]) {
      const value = Number((part * 10 ** power).toPrecision(12));
      if (value >= from && value <= to) found.push(value);
    }
  }
  return found;
}

/** Round steps (1, 2 or 5 times a power of ten) so that there are about `count` labels. */
export function ticks(from: number, to: number, count: number): number[] {
  if (!(to > from) || count < 1) return [from];
  const raw = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  // A step may be a little smaller than asked for: one label too many is better than a bare axis.
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.7) ?? raw;
  const found: number[] = [];
  const first = Math.ceil(from / step - 1e-9);
  // Of numbers that differ in their last digits alone, none is between two others to step to.
  if (!Number.isSafeInteger(first) || !Number.isSafeInteger(Math.ceil(to / step))) return [from];
  for (let at = first; at * step <= to + step * 1e-9; at++) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

/** Those of `values` whose text differs from that of the one before: an axis says nothing twice. */
export function distinct(values: number[], format: (value: number) => string): number[] {
  // Not `map(format)`: a format may take more than the value, such as a number of digits.
  const texts = values.map((value) => format(value));
  return values.filter((_, at) => texts[at] !== texts[at - 1]);
}

/** Steps that are round in the unit that bytes are told in. */
export function byteTicks(from: number, to: number, count: number): number[] {
  const largest = Math.max(Math.abs(from), Math.abs(to), 1);
  const unit = 1024 ** Math.floor(Math.log(largest) / Math.log(1024));
  return ticks(from / unit, to / unit, count).map((value) => value * unit);
}

const TIME_STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
  900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
];

/** Moments on round clock times, and the seconds between two. */
export function timeTicks(from: number, to: number, count: number): { step_s: number; at: number[] } {
  const raw = (to - from) / Math.max(1, count);
  const step_s = TIME_STEPS.find((one) => one >= raw) ?? Math.ceil(raw / 604800) * 604800;
  // Round on the reader's clock: hours of the day, not of Greenwich.
  const offset_s = new Date(from * 1000).getTimezoneOffset() * -60;
  const at: number[] = [];
  for (let n = Math.ceil((from + offset_s) / step_s); n * step_s - offset_s <= to; n++) {
    at.push(n * step_s - offset_s);
  }
  return { step_s, at };
}

/** The least and the largest value; null without any that is finite. */
export function valueRange(lists: readonly (readonly (number | null)[])[]): [number, number] | null {
  let low = Infinity;
  let high = -Infinity;
  for (const values of lists) {
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > high ? null : [low, high];
}

/** The ends of an axis: the range of values; of a single value with room, but not below 0 if it is not; null without any. */
export function extent(lists: readonly (readonly (number | null)[])[]): [number, number] | null {
  const range = valueRange(lists);
  if (!range || range[0] !== range[1]) return range;
  const [value] = range;
  const room = Math.abs(value) * 0.1 || 0.5;
  return [value >= 0 ? Math.max(0, value - room) : value - room, value + room];
}

/** Places of the values that have no value beside them, so that no line shows them. */
export function alone(ys: readonly (number | null)[]): number[] {
  const isThere = (at: number) => Number.isFinite(ys[at] ?? NaN);
  return ys.flatMap((_, at) => (isThere(at) && !isThere(at - 1) && !isThere(at + 1) ? [at] : []));
}

/** Index of the value that is nearest to `wanted` in a list that grows. */
export function nearest(values: readonly number[], wanted: number): number {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? 0) < wanted) low = middle + 1;
    else high = middle;
  }
  const before = values[low - 1];
  const found = values[low];
  if (before === undefined || found === undefined) return Math.max(0, low);
  return wanted - before <= found - wanted ? low - 1 : low;
}
