/** Where everything of a timeline stands: rows below each other, lanes in rows, bars in lanes. */

import type { Look } from "./colors.ts";
import { linear, timeTicks, type Scale } from "./scales.ts";
import type { TimelinePage, TimelineRow } from "./machineTypes.ts";
import { formatTick } from "./format.ts";
import { visible } from "./visible.ts";

export const RULER = 24;
const LABEL = 15;
const LANE = 13;
/** Many lanes are drawn thinner, down to this, so that a row is not higher than a screen. */
const THIN_LANE = 2;
const ROW = 200;
const STATES = 5;
const DENSITY = 18;
const GAP = 7;

export interface PlacedRow {
  row: TimelineRow;
  top: number;
  /** Of the lane with the number 0. */
  lanesTop: number;
  laneHeight: number;
  densityTop: number;
  bottom: number;
}

export interface Layout {
  rows: PlacedRow[];
  height: number;
}

export function layout(rows: readonly TimelineRow[]): Layout {
  const placed: PlacedRow[] = [];
  let top = RULER;
  for (const row of rows) {
    const hasStates = row.bars.columns.lane.includes(-1);
    const lanesTop = top + LABEL + (hasStates ? STATES + 2 : 0);
    const laneHeight = Math.max(THIN_LANE, Math.min(LANE, Math.floor(ROW / Math.max(1, row.num_lanes))));
    const densityTop = lanesTop + row.num_lanes * laneHeight;
    const bottom = densityTop + (row.density ? DENSITY : 0) + GAP;
    placed.push({ row, top, lanesTop, laneHeight, densityTop, bottom: Math.max(bottom, top + LABEL + GAP + 8) });
    top = placed[placed.length - 1]?.bottom ?? top;
  }
  return { rows: placed, height: top };
}

/** Draws on a canvas, or into an SVG. Colors are names of variables in app.css. */
export interface Painter {
  rect(x: number, y: number, width: number, height: number, color: string, opacity?: number): void;
  text(x: number, y: number, text: string, color: string, width?: number): void;
}

export interface Bar {
  row: TimelineRow;
  at: number;
}

export interface View {
  from: number;
  to: number;
}

function barTop(placed: PlacedRow, lane: number): [number, number] {
  if (lane < 0) return [placed.top + LABEL, STATES];
  const { lanesTop, laneHeight } = placed;
  return [lanesTop + lane * laneHeight, laneHeight - (laneHeight > 6 ? 2 : 1)];
}

export interface Drawn {
  page: TimelinePage;
  view: View;
  width: number;
  height: number;
  /** Pixels that are scrolled away at the top. */
  scroll: number;
  /** Address of the rollout that stands out. */
  mark: string;
  selected: Bar | null;
  /** How a bar looks; undefined for one without a name. */
  lookOf: (name: string, kind: string) => Look | undefined;
}

export const timeScale = (view: View, width: number): Scale => linear(view.from, view.to, 0, width);

export function draw(painter: Painter, drawn: Drawn): void {
  const { page, view, width, height, scroll } = drawn;
  const x = timeScale(view, width);
  painter.rect(0, 0, width, height, "--ground");
  drawSteps(painter, drawn, x);
  for (const placed of layout(page.rows).rows) {
    if (placed.bottom < scroll + RULER || placed.top > scroll + height) continue;
    drawRow(painter, drawn, placed, x);
  }
  for (const mark of page.marks) {
    const at = x(mark.time_s);
    if (at < 0 || at > width) continue;
    painter.rect(at, RULER, 1.5, height - RULER, mark.kind === "restart" ? "--bad" : "--watch");
  }
  drawRuler(painter, view, width, x);
}

function drawSteps(painter: Painter, { page, width, height }: Drawn, x: Scale): void {
  const { step, end_s } = page.steps.columns;
  let last = -Infinity;
  end_s.forEach((time_s, at) => {
    const place = x(time_s);
    if (place < 0 || place > width || place - last < 24) return;
    last = place;
    painter.rect(place, RULER, 1, height - RULER, "--line");
    painter.text(place + 2, height - 4, String(step[at]), "--faint");
  });
}

function drawRuler(painter: Painter, view: View, width: number, x: Scale): void {
  painter.rect(0, 0, width, RULER, "--raised");
  const { step_s, at } = timeTicks(view.from, view.to, width / 110);
  for (const time_s of at) {
    painter.rect(x(time_s), RULER - 5, 1, 5, "--faint");
    painter.text(x(time_s) + 3, 15, formatTick(time_s, step_s), "--faint");
  }
}

function drawRow(painter: Painter, drawn: Drawn, placed: PlacedRow, x: Scale): void {
  const { row } = placed;
  const { scroll, width, mark, selected, lookOf } = drawn;
  painter.rect(0, placed.top - scroll - 1, width, 1, "--line");
  if (row.density) drawDensity(painter, drawn, placed, x);
  const { start_s, duration_s, lane, name, address } = row.bars.columns;
  for (let at = 0; at < start_s.length; at++) {
    const left = x(start_s[at] ?? 0);
    const right = x((start_s[at] ?? 0) + (duration_s[at] ?? 0));
    if (right < 0 || left > width) continue;
    const [top, height] = barTop(placed, lane[at] ?? 0);
    const wide = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
    const isFaint = mark !== "" && address[at] !== mark && row.kind !== "driver" && row.kind !== "rank";
    if (isSame(selected, row, at) || (mark !== "" && address[at] === mark)) {
      painter.rect(left - 2, top - scroll - 2, wide + 4, height + 4, "--text");
    }
    const look = lookOf(name[at] ?? "", row.kind);
    painter.rect(left, top - scroll, wide, height, colorOf(look), isFaint ? 0.35 : 1);
    const shown = Math.min(right, width) - Math.max(left, 0);
    // A name is not to be read over lines, and says more than they do.
    if (height < 10 || shown <= 34) drawPattern(painter, look, Math.max(left, 0), top - scroll, Math.min(left + wide, width), height);
    else {
      painter.text(Math.max(left, 0) + 3, top - scroll + 9, visible(name[at] ?? ""), "--ground", shown - 6);
    }
  }
  painter.text(4, placed.top - scroll + 11, visible(row.label), "--text");
}

const PATTERN_PIXELS = 5;

const colorOf = (look: Look | undefined): string => (look ? `--series-${look.color}` : "--faint");

/** Draw the lines of a pattern over a bar, at the same pixels over bars that touch. */
function drawPattern(painter: Painter, look: Look | undefined, left: number, top: number, right: number, height: number): void {
  if (!look?.pattern || right - left < 3) return;
  if (look.pattern === 2) {
    painter.rect(left, top + height / 2 - 0.75, right - left, 1.5, "--ground", 0.75);
    return;
  }
  for (let x = Math.ceil(left / PATTERN_PIXELS) * PATTERN_PIXELS; x < right - 1; x += PATTERN_PIXELS) {
    if (look.pattern === 1) painter.rect(x, top, 1, height, "--ground", 0.75);
    else painter.rect(x, top + height / 2 - 1, 2, 2, "--ground", 0.9);
  }
}

/** Whether a bar is the chosen one, whose window may have been another one. */
function isSame(bar: Bar | null, row: TimelineRow, at: number): boolean {
  if (bar === null || bar.row.source !== row.source) return false;
  const [one, other] = [bar.row.bars.columns, row.bars.columns];
  return one.start_s[bar.at] === other.start_s[at] && one.name[bar.at] === other.name[at] && one.address[bar.at] === other.address[at];
}

function drawDensity(painter: Painter, drawn: Drawn, placed: PlacedRow, x: Scale): void {
  const { page, scroll, lookOf } = drawn;
  const density = placed.row.density;
  if (!density) return;
  const most = density.busy.reduce((a, b) => Math.max(a, b), 0) || 1;
  density.bucket.forEach((bucket, at) => {
    const left = x(page.from + bucket * page.bucket_s);
    const right = x(page.from + (bucket + 1) * page.bucket_s);
    const height = Math.max(1, ((density.busy[at] ?? 0) / most) * (DENSITY - 2));
    const top = placed.densityTop - scroll + DENSITY - 2 - height;
    const look = lookOf(density.name[at] ?? "", placed.row.kind);
    painter.rect(left, top, Math.max(1, right - left), height, colorOf(look), 0.85);
    drawPattern(painter, look, left, top, right, height);
  });
}

/** The bar at a pixel, the innermost first; null if there is none within two pixels. */
export function barAt(drawn: Drawn, pixelX: number, pixelY: number): Bar | null {
  const x = timeScale(drawn.view, drawn.width);
  const y = pixelY + drawn.scroll;
  const placed = layout(drawn.page.rows).rows.find((one) => y >= one.top && y < one.bottom);
  if (!placed || pixelY < RULER) return null;
  const { start_s, duration_s, lane } = placed.row.bars.columns;
  let found: Bar | null = null;
  for (let at = 0; at < start_s.length; at++) {
    const [top, height] = barTop(placed, lane[at] ?? 0);
    if (y < top - 1 || y > top + height + 1) continue;
    const left = x(start_s[at] ?? 0);
    const right = x((start_s[at] ?? 0) + (duration_s[at] ?? 0));
    if (pixelX >= left - 2 && pixelX <= Math.max(right, left + 1) + 2) found = { row: placed.row, at };
  }
  return found;
}

/** Return `view` zoomed around `center_s`, never to less than a tenth of a millisecond. */
export function zoomed(view: View, factor: number, center_s: number): View {
  const width = Math.max(1e-4, (view.to - view.from) * factor);
  const part = (center_s - view.from) / (view.to - view.from || 1);
  const from = center_s - width * part;
  return { from, to: from + width };
}

/** Return `view` so that something of the run stays in it. */
export function kept(view: View, extent: View): View {
  const width = Math.min(view.to - view.from, (extent.to - extent.from) * 1.2 || 1);
  const from = Math.min(Math.max(view.from, extent.from - width * 0.5), extent.to - width * 0.5);
  return { from, to: from + width };
}
