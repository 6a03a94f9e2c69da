/** Curves over steps or time, as one SVG that can be saved, read by keys, and clicked. */

import { useId, useRef, useState } from "preact/hooks";
import { seriesColor } from "../lib/colors.ts";
import { formatDate, formatNumber, formatTick } from "../lib/format.ts";
import { saveSvg } from "../lib/save.ts";
import { alone, byteTicks, extent, linear, nearest, ticks, timeTicks, type Scale } from "../lib/scales.ts";
import { BottomAxis, LeftAxis } from "./Axis.tsx";
import { useWidth } from "./width.ts";

export interface Series {
  name: string;
  xs: number[];
  ys: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
  color?: number;
}

export interface Mark {
  x: number;
  label: string;
  kind: string;
}

interface Props {
  title: string;
  series: Series[];
  marks?: Mark[];
  height?: number;
  isTime?: boolean;
  isBytes?: boolean;
  xName?: string;
  format?: (value: number | null) => string;
  /** The largest value that there can be. */
  most?: number | undefined;
  /** A click, or Enter, at the value under the cursor. */
  onPick?: (x: number, series: Series) => void;
  pickHint?: string;
}

const TOP = 8;
const BOTTOM = 22;
const RIGHT = 8;

export function Chart(props: Props) {
  const { title, series, marks = [], height = 170, isTime = false, xName = "step" } = props;
  const { format = formatNumber, isBytes = false, onPick, pickHint } = props;
  const [ref, width] = useWidth<HTMLDivElement>();
  const picture = useRef<SVGSVGElement>(null);
  const clip = useId();
  const [cursor, setCursor] = useState<number | null>(null);
  const range = rangeOf(series, props.most);
  const domain = extent(series.map((one) => one.xs));
  const longest = series.reduce<Series | null>((a, b) => (a && a.xs.length >= b.xs.length ? a : b), null);
  const xs = longest?.xs ?? [];
  const head = (
    <figcaption>
      <span class="chart-title">{title}</span>
      {picture.current && range && (
        <button type="button" class="quiet" onClick={() => picture.current && saveSvg(title, picture.current)}>
          <span aria-hidden="true">SVG</span>
          <span class="unseen">Save {title} as SVG</span>
        </button>
      )}
    </figcaption>
  );
  if (!range || !domain) {
    return (
      <figure class="chart" ref={ref as never}>
        {head}
        <p class="empty">Nothing is recorded yet.</p>
      </figure>
    );
  }
  const levels = isBytes ? byteTicks(range[0], range[1], 4) : ticks(range[0], range[1], 4);
  const left = 12 + 6.3 * Math.max(4, ...levels.map((level) => format(level).length));
  const x = linear(domain[0], domain[1], left, Math.max(left + 40, width - RIGHT));
  const y = linear(range[0], range[1], height - BOTTOM, TOP);
  const move = (by: number) => {
    const now = cursor === null ? xs.length - 1 : nearest(xs, cursor);
    const found = xs[Math.max(0, Math.min(xs.length - 1, now + by))];
    if (found !== undefined) setCursor(found);
  };
  const pick = (at: number | null) => {
    if (at !== null && longest && onPick) onPick(at, longest);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by !== undefined) move(by);
    else if (event.key === "Enter") pick(cursor);
    else if (event.key === "Escape") setCursor(null);
    else return;
    event.preventDefault();
  };
  const under = (event: MouseEvent) => {
    const box = picture.current?.getBoundingClientRect();
    return box ? (xs[nearest(xs, x.invert(event.clientX - box.left))] ?? null) : null;
  };
  const at = isTime ? timeTicks(domain[0], domain[1], width / 90) : null;
  const summary = series.map((one) => spoken(one, format)).join("; ");
  const tipHead = (value: number) => (isTime ? formatDate(value) : `${xName} ${formatNumber(value)}`);
  return (
    <figure class="chart">
      {head}
      <div
        ref={ref}
        class={onPick ? "plot can-pick" : "plot"}
        tabIndex={0}
        role="slider"
        aria-label={title}
        aria-describedby={`${clip}-about`}
        aria-valuemin={domain[0]}
        aria-valuemax={domain[1]}
        aria-valuenow={cursor ?? domain[1]}
        aria-valuetext={cursor === null ? "newest" : `${tipHead(cursor)}: ${valuesAt(series, cursor, format)}`}
        onKeyDown={onKeyDown}
        onPointerMove={(event) => setCursor(under(event))}
        onPointerLeave={() => setCursor(null)}
        onClick={(event) => pick(under(event))}
      >
        <svg ref={picture} width={width} height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
          <LeftAxis scale={y} at={levels} width={width - RIGHT} bottom={0} left={left} format={format} />
          <BottomAxis
            scale={x}
            at={at ? at.at : ticks(domain[0], domain[1], Math.max(2, width / 90)).filter(Number.isInteger)}
            width={width - RIGHT}
            bottom={height - BOTTOM}
            left={left}
            format={at ? (value) => formatTick(value, at.step_s) : formatNumber}
          />
          {marks.filter((mark) => mark.x >= domain[0] && mark.x <= domain[1]).map((mark, number) => (
            <line key={number} class={`mark mark-${mark.kind}`} x1={x(mark.x)} x2={x(mark.x)} y1={TOP} y2={height - BOTTOM}>
              <title>{mark.label}</title>
            </line>
          ))}
          <clipPath id={clip}>
            <rect x={left} y={TOP - 2} width={Math.max(1, width - left - RIGHT)} height={height - TOP - BOTTOM + 4} />
          </clipPath>
          <g clip-path={`url(#${clip})`}>
            {series.map((one, number) => (
              <Curve key={one.name} series={one} color={seriesColor(one.color ?? number)} x={x} y={y} />
            ))}
          </g>
          {cursor !== null && (
            <line class="cursor" data-only-screen x1={x(cursor)} x2={x(cursor)} y1={TOP} y2={height - BOTTOM} />
          )}
        </svg>
        {cursor !== null && (
          <Tip series={series} x={cursor} pixel={x(cursor)} width={width} format={format}
            head={tipHead(cursor)} />
        )}
        <p class="unseen" id={`${clip}-about`}>
          {summary}. {onPick ? pickHint : ""}
        </p>
      </div>
      {series.length > 1 && <Legend series={series} />}
    </figure>
  );
}

/** All values, and of wide intervals as much as leaves the curve its shape. */
function rangeOf(series: Series[], most = Infinity): [number, number] | null {
  const values = extent(series.map((one) => one.ys));
  const all = extent(series.flatMap((one) => [one.ys, one.low ?? [], one.high ?? []]));
  if (!values || !all) return values;
  const room = (values[1] - values[0]) * 0.6;
  return [Math.max(all[0], values[0] - room), Math.min(all[1], values[1] + room, Math.max(most, values[0]))];
}

function spoken(series: Series, format: (value: number | null) => string): string {
  const range = extent([series.ys]);
  const last = series.ys.findLast((value) => value !== null) ?? null;
  if (!range) return `${series.name} has no values`;
  return `${series.name} from ${format(range[0])} to ${format(range[1])}, newest ${format(last)}`;
}

function valuesAt(series: Series[], x: number, format: (value: number | null) => string): string {
  return series.map((one) => `${one.name} ${format(one.ys[nearest(one.xs, x)] ?? null)}`).join(", ");
}

function Curve({ series, color, x, y }: { series: Series; color: string; x: Scale; y: Scale }) {
  const { xs, ys, low, high } = series;
  return (
    <g>
      {low && high && <path class="band" fill={color} d={band(xs, low, high, x, y)} />}
      <path class="curve" stroke={color} d={line(xs, ys, x, y)} />
      {alone(ys).map((at) => (
        <circle key={at} cx={x(xs[at] ?? 0)} cy={y(ys[at] ?? 0)} r={ys.length < 2 ? 3 : 2} fill={color} />
      ))}
    </g>
  );
}

/** A path with gaps where there is no value. */
export function line(xs: number[], ys: (number | null)[], x: Scale, y: Scale): string {
  let text = "";
  let isOpen = false;
  ys.forEach((value, at) => {
    if (value === null || !Number.isFinite(value)) {
      isOpen = false;
      return;
    }
    text += `${isOpen ? "L" : "M"}${x(xs[at] ?? 0).toFixed(1)} ${y(value).toFixed(1)}`;
    isOpen = true;
  });
  return text;
}

/** The areas between two curves, one for each stretch where both have values. */
export function band(xs: number[], low: (number | null)[], high: (number | null)[], x: Scale, y: Scale): string {
  let text = "";
  let upper: string[] = [];
  let lower: string[] = [];
  const close = () => {
    if (upper.length > 1) text += `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    upper = [];
    lower = [];
  };
  xs.forEach((value, at) => {
    const from = low[at];
    const to = high[at];
    if (from === null || to === null || from === undefined || to === undefined) {
      close();
      return;
    }
    upper.push(`${x(value).toFixed(1)} ${y(to).toFixed(1)}`);
    lower.push(`${x(value).toFixed(1)} ${y(from).toFixed(1)}`);
  });
  close();
  return text;
}

interface TipProps {
  series: Series[];
  x: number;
  pixel: number;
  width: number;
  head: string;
  format: (value: number | null) => string;
}

function Tip({ series, x, pixel, width, head, format }: TipProps) {
  const isRight = pixel > width / 2;
  const place = isRight ? { right: `${width - pixel + 8}px` } : { left: `${pixel + 8}px` };
  return (
    <div class="tip" style={place} aria-hidden="true">
      <b>{head}</b>
      {series.slice(0, 12).map((one, number) => {
        const at = nearest(one.xs, x);
        const [low, high] = [one.low?.[at], one.high?.[at]];
        return (
          <div key={one.name}>
            {series.length > 1 && <i class={`swatch series-${(one.color ?? number) % 8}`} />}
            {series.length > 1 && `${one.name} `}
            {format(one.ys[at] ?? null)}
            {low != null && high != null && ` (${format(low)} to ${format(high)})`}
            {one.xs[at] !== x && !head.includes(":") && ` at ${formatNumber(one.xs[at])}`}
          </div>
        );
      })}
    </div>
  );
}

export function Legend({ series }: { series: { name: string; color?: number }[] }) {
  return (
    <ul class="legend">
      {series.map((one, number) => (
        <li key={one.name}>
          <i class={`swatch series-${(one.color ?? number) % 8}`} /> {one.name}
        </li>
      ))}
    </ul>
  );
}
