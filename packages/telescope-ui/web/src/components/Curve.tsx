/** What is drawn in a chart: curves with their averages and bands, points with whiskers. */

import { seriesColor } from "../lib/colors.ts";
import { alone, type Scale } from "../lib/scales.ts";
import type { Point, Series } from "./Chart.tsx";

export function Curve({ series, color, x, y }: { series: Series; color: string; x: Scale; y: Scale }) {
  const { xs, ys, low, high, smooth } = series;
  return (
    <g>
      {low && high && !smooth && <path class="band" fill={color} d={band(xs, low, high, x, y)} />}
      <path class={smooth ? "curve is-raw" : "curve"} stroke={color} d={line(xs, ys, x, y)} />
      {alone(ys).map((at) => (
        <circle
          key={at}
          cx={x(xs[at] ?? 0)}
          cy={y(ys[at] ?? 0)}
          r={ys.length < 2 ? 3 : 2}
          fill={color}
        />
      ))}
      {smooth && <path class="curve is-smooth" stroke={color} d={line(xs, smooth, x, y)} />}
    </g>
  );
}

export function Whiskers({ points, x, y }: { points: Point[]; x: Scale; y: Scale }) {
  // On a logarithmic axis 0 is nowhere: a whisker that reaches there goes down to the end of the axis.
  const end = (value: number) => (Number.isFinite(y(value)) ? y(value) : y(y.from));
  return (
    <g class="whiskers">
      {points.filter((one) => Number.isFinite(y(one.y))).map((one) => (
        <g key={one.label} stroke={seriesColor(one.color)} fill={seriesColor(one.color)}>
          {one.low !== null && one.high !== null && (
            <path class="whisker" d={`M${x(one.x)} ${end(one.low)}V${end(one.high)}m-3 0h6M${x(one.x) - 3} ${end(one.low)}h6`} />
          )}
          <circle cx={x(one.x)} cy={y(one.y)} r={4} />
        </g>
      ))}
    </g>
  );
}

/** A path with gaps where there is no value. */
export function line(xs: number[], ys: (number | null)[], x: Scale, y: Scale): string {
  let text = "";
  let isOpen = false;
  ys.forEach((value, at) => {
    const pixel = value === null ? NaN : y(value);
    if (!Number.isFinite(pixel)) {
      isOpen = false;
      return;
    }
    text += `${isOpen ? "L" : "M"}${x(xs[at] ?? 0).toFixed(1)} ${pixel.toFixed(1)}`;
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
    const [from, to] = [low[at], high[at]].map((one) => (one === null || one === undefined ? NaN : y(one)));
    if (!Number.isFinite(from) || !Number.isFinite(to) || from === undefined || to === undefined) {
      close();
      return;
    }
    upper.push(`${x(value).toFixed(1)} ${to.toFixed(1)}`);
    lower.push(`${x(value).toFixed(1)} ${from.toFixed(1)}`);
  });
  close();
  return text;
}
