/** Axes of SVG charts. */

import { formatNumber } from "../lib/format.ts";
import type { Scale } from "../lib/scales.ts";

interface AxisProps {
  scale: Scale;
  at: number[];
  width: number;
  bottom: number;
  left: number;
  format?: (value: number) => string;
}

/** What a label may stand out beyond the end of its axis, and half the width of a letter. */
const ROOM = 7;
const HALF_LETTER = 3.4;

export function BottomAxis({ scale, at, width, bottom, left, format = formatNumber }: AxisProps) {
  return (
    <g class="axis">
      <line x1={left} x2={width} y1={bottom} y2={bottom} />
      {at.map((value) => (
        <g key={value}>
          <line x1={scale(value)} x2={scale(value)} y1={bottom} y2={bottom + 4} />
          <text x={Math.min(scale(value), width + ROOM - HALF_LETTER * format(value).length)} y={bottom + 15} text-anchor="middle">
            {format(value)}
          </text>
        </g>
      ))}
    </g>
  );
}

export function LeftAxis({ scale, at, width, left, format = formatNumber }: AxisProps) {
  return (
    <g class="axis">
      {at.map((value) => (
        <g key={value}>
          <line class="grid" x1={left} x2={width} y1={scale(value)} y2={scale(value)} />
          <text x={left - 6} y={scale(value) + 4} text-anchor="end">
            {format(value)}
          </text>
        </g>
      ))}
    </g>
  );
}
