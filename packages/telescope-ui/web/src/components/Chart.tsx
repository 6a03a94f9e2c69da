/** Curves over steps or time, as one SVG that can be saved, read by keys, and clicked. */

import { useId, useMemo, useRef, useState } from "preact/hooks";
import { seriesColor } from "../lib/colors.ts";
import { useCursor } from "../lib/cursor.ts";
import { formatDate, formatNumber, formatTick } from "../lib/format.ts";
import { saveSvg } from "../lib/save.ts";
import { byteTicks, distinct, extent, linear, logarithmic, logTicks, nearest, ticks, timeTicks, valueRange, type Scale } from "../lib/scales.ts";
import { BottomAxis, LeftAxis } from "./Axis.tsx";
import { Curve, Whiskers } from "./Curve.tsx";
import { useDrag } from "./drag.ts";
import { useWidth } from "./width.ts";

export interface Series {
  name: string;
  xs: number[];
  ys: (number | null)[];
  /** Steps of `xs`, where these are something else. */
  steps?: number[];
  /** Drawn bold over what is then faint. */
  smooth?: (number | null)[] | undefined;
  low?: (number | null)[] | undefined;
  high?: (number | null)[] | undefined;
  color?: number;
}

/** A single value with its interval. */
export interface Point {
  x: number;
  y: number;
  low: number | null;
  high: number | null;
  label: string;
  color: number;
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
  /** The least and the largest value that there can be: the axis shows all of it, unless it is to fit. */
  bounds?: [number, number] | null;
  scale?: "range" | "fit" | "log";
  points?: Point[];
  /** Stretches of the axis that are shaded. */
  shaded?: [number, number][];
  /** Charts of one group show the same place under the pointer. */
  group?: string;
  /** The ends of the axis, where charts beside this one are to have the same. */
  domain?: [number, number] | null;
  /** A stretch was drawn over with the pointer, in steps; null = all is wanted again. */
  onZoom?: (steps: [number, number] | null) => void;
  isZoomed?: boolean;
  /** A click, or Enter, at the value under the cursor. */
  onPick?: (x: number, series: Series) => void;
  pickHint?: string;
}

const TOP = 8;
const BOTTOM = 22;
const RIGHT = 8;

export function Chart(props: Props) {
  const { title, series, height = 170, isTime = false, xName = "step", points = [] } = props;
  const { format = formatNumber, onPick, pickHint, onZoom, isZoomed, scale } = props;
  const [ref, width] = useWidth<HTMLDivElement>();
  const picture = useRef<SVGSVGElement>(null);
  const clip = useId();
  const [cursor, setCursor] = useCursor(props.group);
  const [isOver, setIsOver] = useState(false);
  const longest = series.reduce<Series | null>((a, b) => (a && a.xs.length >= b.xs.length ? a : b), null);
  const xs = longest?.xs ?? [];
  const drawn = [series, props.points, props.marks, props.shaded, scale, width, height, props.domain?.[0], props.domain?.[1]];
  // The pointer moves often, and the picture below it stays.
  const frame = useMemo(() => frameOf(props, width, height), drawn);
  const still = useMemo(() => frame && <Still {...props} frame={frame} width={width} height={height} clip={clip} />, drawn);
  const domain = frame?.domain ?? [0, 1];
  const x = frame?.x ?? linear(0, 1, 0, 1);
  const stepAt = (at: number) => longest?.steps?.[at] ?? xs[at] ?? 0;
  const pick = (place: number | null) => {
    if (place !== null && longest && onPick) onPick(stepAt(nearest(xs, place)), longest);
  };
  const zoom = (from: number, to: number) => {
    const first = xs.findIndex((one) => one >= from);
    const last = xs.findLastIndex((one) => one <= to);
    if (onZoom && first >= 0 && last > first) onZoom([Math.round(stepAt(first)), Math.round(stepAt(last))]);
  };
  const placeUnder = (event: MouseEvent) => {
    const box = picture.current?.getBoundingClientRect();
    return box ? x.invert(event.clientX - box.left) : null;
  };
  const under = (event: MouseEvent) => {
    const place = placeUnder(event);
    return place === null ? null : (xs[nearest(xs, place)] ?? null);
  };
  const drag = useDrag({
    placeUnder,
    onDrag: onZoom ? zoom : undefined,
    onClick: (event) => pick(under(event)),
    onDouble: isZoomed && onZoom ? () => onZoom(null) : undefined,
  });
  const head = (
    <figcaption>
      <span class="chart-title">{title}</span>
      {cursor !== null && !isOver && frame && (
        <span class="faint number" aria-hidden="true">
          {valuesAt(series.slice(0, 1), cursor, format, false)}
        </span>
      )}
      {picture.current && frame && (
        <button type="button" class="quiet" onClick={() => picture.current && saveSvg(title, picture.current)}>
          <span aria-hidden="true">SVG</span>
          <span class="unseen">Save {title} as SVG</span>
        </button>
      )}
    </figcaption>
  );
  if (!frame) {
    return (
      <figure class="chart" ref={ref as never}>
        {head}
        <p class="empty">{scale === "log" && extent(series.map((one) => one.ys)) ? "No value is above 0." : "Nothing is recorded yet."}</p>
      </figure>
    );
  }
  const move = (by: number) => {
    const now = cursor === null ? xs.length - 1 : nearest(xs, cursor);
    const found = xs[Math.max(0, Math.min(xs.length - 1, now + by))];
    if (found !== undefined) setCursor(found);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    const quarter = (domain[1] - domain[0]) / 4;
    const middle = cursor ?? (domain[0] + domain[1]) / 2;
    if (by !== undefined) move(by);
    else if (event.key === "Enter") pick(cursor);
    else if (event.key === "Escape") setCursor(null);
    else if (event.key.toLowerCase() === "w" && onZoom) zoom(middle - quarter, middle + quarter);
    else if (event.key.toLowerCase() === "s" && onZoom && isZoomed) onZoom(null);
    else return;
    event.preventDefault();
  };
  const summary = series.map((one) => spoken(one, format)).join("; ");
  const tipHead = (value: number) => (isTime ? formatDate(value) : `${xName} ${formatNumber(value)}`);
  const inside = (value: number) => value >= domain[0] && value <= domain[1];
  const bottom = height - BOTTOM;
  return (
    <figure class="chart">
      {head}
      <div
        ref={ref}
        class={`plot${onPick ? " can-pick" : ""}${onZoom ? " can-zoom" : ""}`}
        tabIndex={0}
        role="slider"
        aria-label={title}
        aria-describedby={`${clip}-about`}
        aria-valuemin={domain[0]}
        aria-valuemax={domain[1]}
        aria-valuenow={cursor === null || !inside(cursor) ? domain[1] : cursor}
        aria-valuetext={cursor === null ? "newest" : `${tipHead(cursor)}: ${valuesAt(series, cursor, format)}`}
        onKeyDown={onKeyDown}
        {...drag.handlers}
        onPointerMove={(event) => {
          drag.handlers.onPointerMove(event);
          setIsOver(true);
          setCursor(under(event));
        }}
        onPointerLeave={() => {
          setIsOver(false);
          setCursor(null);
        }}
      >
        <svg ref={picture} width={width} height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
          {still}
          {cursor !== null && inside(cursor) && (
            <line class="cursor" data-only-screen x1={x(cursor)} x2={x(cursor)} y1={TOP} y2={bottom} />
          )}
          {drag.span && (
            <rect
              class="chosen-span"
              data-only-screen
              x={x(drag.span[0])}
              width={x(drag.span[1]) - x(drag.span[0])}
              y={TOP}
              height={bottom - TOP}
            />
          )}
        </svg>
        {cursor !== null && isOver && (
          <Tip series={series} x={cursor} pixel={x(cursor)} width={width} format={format} head={tipHead(cursor)}
            points={points.filter((one) => Math.abs(x(one.x) - x(cursor)) < 8)} />
        )}
        <p class="unseen" id={`${clip}-about`}>
          {summary}. {onPick ? pickHint : ""}
        </p>
      </div>
      {series.length > 1 && <Legend series={series} />}
    </figure>
  );
}

interface Frame {
  x: Scale;
  y: Scale;
  domain: [number, number];
  left: number;
  levels: number[];
}

/** Both axes; null without a value. */
function frameOf(props: Props, width: number, height: number): Frame | null {
  const { series, points = [], format = formatNumber, scale } = props;
  const range = rangeOf(props);
  const domain = props.domain ?? extent([...series.map((one) => one.xs), points.map((one) => one.x)]);
  if (!range || !domain) return null;
  const levels = distinct(levelsOf(range, props), format);
  const left = 12 + 6.3 * Math.max(4, ...levels.map((level) => format(level).length));
  const x = linear(domain[0], domain[1], left, Math.max(left + 40, width - RIGHT));
  const y = (scale === "log" ? logarithmic : linear)(range[0], range[1], height - BOTTOM, TOP);
  return { x, y, domain, left, levels };
}

/** What is drawn, without what follows the pointer. */
function Still(props: Props & { frame: Frame; width: number; height: number; clip: string }) {
  const { series, marks = [], points = [], shaded = [], format = formatNumber, xName = "step" } = props;
  const { frame, width, height, clip } = props;
  const { x, y, domain, left, levels } = frame;
  const bottom = height - BOTTOM;
  const at = props.isTime ? timeTicks(domain[0], domain[1], width / 90) : null;
  const inside = (value: number) => value >= domain[0] && value <= domain[1];
  return (
    <>
      {shaded.map(([from, to]) => (
        <rect key={from} class="shaded" x={x(from) - 2} width={Math.max(4, x(to) - x(from) + 4)} y={TOP} height={bottom - TOP} />
      ))}
      <LeftAxis scale={y} at={levels} width={width - RIGHT} bottom={0} left={left} format={format} />
      <BottomAxis
        scale={x}
        at={at ? at.at : ticks(domain[0], domain[1], Math.max(2, width / 90)).filter((one) => xName === "hour" || Number.isInteger(one))}
        width={width - RIGHT}
        bottom={bottom}
        left={left}
        format={at ? (value) => formatTick(value, at.step_s) : formatNumber}
      />
      {marks.filter((mark) => inside(mark.x)).map((mark, number) => (
        <line key={number} class={`mark mark-${mark.kind}`} x1={x(mark.x)} x2={x(mark.x)} y1={TOP} y2={bottom}>
          <title>{mark.label}</title>
        </line>
      ))}
      <clipPath id={clip}>
        <rect x={left - 4} y={TOP - 4} width={Math.max(1, width - left - RIGHT + 8)} height={bottom - TOP + 8} />
      </clipPath>
      <g clip-path={`url(#${clip})`}>
        {series.map((one, number) => (
          <Curve key={one.name} series={one} color={seriesColor(one.color ?? number)} x={x} y={y} />
        ))}
        <Whiskers points={points.filter((one) => inside(one.x))} x={x} y={y} />
      </g>
    </>
  );
}

/** All values, of wide intervals as much as leaves the curve its shape, and the whole of what can be. */
function rangeOf({ series, points = [], most = Infinity, bounds, scale }: Props): [number, number] | null {
  const single = points.map((one) => one.y);
  if (scale === "log") {
    const above = [...series.map((one) => one.ys), single].map((ys) => ys.filter((one) => one !== null && one > 0));
    const found = extent(above);
    return found && (found[0] > 0 ? found : [found[1] / 10, found[1]]);
  }
  const values = extent([...series.map((one) => one.ys), single]);
  const whiskers = points.flatMap((one) => [one.low, one.high]);
  const all = extent([...series.flatMap((one) => [one.ys, one.low ?? [], one.high ?? []]), single, whiskers]);
  if (!values || !all) return values;
  if (bounds && scale !== "fit") return [Math.min(bounds[0], values[0]), Math.max(bounds[1], values[1])];
  const room = (values[1] - values[0]) * 0.6;
  return [Math.max(all[0], values[0] - room), Math.min(all[1], values[1] + room, Math.max(most, values[0]))];
}

function levelsOf([from, to]: [number, number], { isBytes, scale }: Props): number[] {
  if (scale === "log") return logTicks(from, to, 4);
  return isBytes ? byteTicks(from, to, 4) : ticks(from, to, 4);
}

/** What a curve is for somebody who hears it. */
export function spoken({ name, ys }: Pick<Series, "name" | "ys">, format: (value: number | null) => string): string {
  const range = valueRange([ys]);
  const last = ys.findLast((value) => value !== null) ?? null;
  if (!range) return `${name} has no values`;
  const [low, high] = range;
  if (low === high) return `${name} is always ${format(low)}`;
  return `${name} from ${format(low)} to ${format(high)}, newest ${format(last)}`;
}

function valuesAt(series: Series[], x: number, format: (value: number | null) => string, isNamed = true): string {
  return series
    .map((one) => `${isNamed ? `${one.name} ` : ""}${format(one.ys[nearest(one.xs, x)] ?? null)}`)
    .join(", ");
}

interface TipProps {
  series: Series[];
  x: number;
  pixel: number;
  width: number;
  head: string;
  points: Point[];
  format: (value: number | null) => string;
}

function Tip({ series, x, pixel, width, head, points, format }: TipProps) {
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
            {one.smooth && `, smoothed ${format(one.smooth[at] ?? null)}`}
            {low != null && high != null && ` (${format(low)} to ${format(high)})`}
            {one.xs[at] !== x && !head.includes(":") && ` at ${formatNumber(one.xs[at])}`}
          </div>
        );
      })}
      {points.map((one) => (
        <div key={one.label}>
          <i class={`swatch series-${one.color % 8}`} />
          {one.label} {format(one.y)}
          {one.low !== null && one.high !== null && ` (${format(one.low)} to ${format(one.high)})`}
        </div>
      ))}
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
