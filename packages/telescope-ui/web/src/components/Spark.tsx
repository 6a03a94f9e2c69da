/** A curve without axes, as large as a word. */

import { extent, linear } from "../lib/scales.ts";
import { formatNumber } from "../lib/format.ts";
import { line } from "./Curve.tsx";

const WIDTH = 120;
const HEIGHT = 24;

export function Spark({ xs, ys, color = 0 }: { xs: number[]; ys: (number | null)[]; color?: number }) {
  const range = extent([ys]);
  const domain = extent([xs]);
  if (!range || !domain) return <span class="faint">none</span>;
  const x = linear(domain[0], domain[1], 2, WIDTH - 2);
  const y = linear(range[0], range[1], HEIGHT - 3, 3);
  const label = `from ${formatNumber(ys.find((one) => one !== null))} to ${formatNumber(ys.findLast((one) => one !== null))}`;
  return (
    <svg class="spark" width={WIDTH} height={HEIGHT} role="img" aria-label={label}>
      <path class="curve" stroke={`var(--series-${color})`} d={line(xs, ys, x, y)} />
    </svg>
  );
}
