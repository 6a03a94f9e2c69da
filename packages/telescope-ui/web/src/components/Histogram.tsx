/** How often which value is there; a bar can be clicked to see only its rollouts. */

import { useRef } from "preact/hooks";
import { formatByName, formatNumber, plural } from "../lib/format.ts";
import { saveSvg } from "../lib/save.ts";
import { linear, ticks } from "../lib/scales.ts";
import type { Distribution } from "../lib/types.ts";
import { BottomAxis } from "./Axis.tsx";
import { useWidth } from "./width.ts";

const HEIGHT = 110;
const LEFT = 8;

interface Props {
  data: Distribution;
  onRange: (low: number, high: number) => void;
  onValue: (value: string) => void;
}

export function Histogram({ data, onRange, onValue }: Props) {
  if (data.kind === "text") return <Values data={data} onValue={onValue} />;
  return <Bars data={data} onRange={onRange} />;
}

function Bars({ data, onRange }: Omit<Props, "onValue">) {
  const [ref, width] = useWidth<HTMLElement>();
  const picture = useRef<SVGSVGElement>(null);
  const { low = [], high = [], least = [], most = [], count } = data.bins;
  const from = low[0] ?? 0;
  const to = high[high.length - 1] ?? 1;
  const x = linear(from, to, LEFT, width - 12);
  const y = linear(0, Math.max(1, ...count), HEIGHT - 20, 6);
  const share = data.total ? data.missing / data.total : 0;
  return (
    <figure class="chart" ref={ref as never}>
      <figcaption>
        <span class="chart-title">
          {data.name}: mean {formatByName(data.name, data.mean)}, median {formatByName(data.name, data.quantiles?.["0.5"])}
        </span>
        <button type="button" class="quiet" onClick={() => picture.current && saveSvg(data.name, picture.current)}>
          <span aria-hidden="true">SVG</span>
          <span class="unseen">Save the distribution as SVG</span>
        </button>
      </figcaption>
      <svg ref={picture} width={width} height={HEIGHT} role="group" aria-label={`distribution of ${data.name}`}>
        {count.map((number, at) => {
          const [a, b] = [low[at] ?? 0, high[at] ?? 0];
          // The ends of bars are rounded, and belong to one of two: what is in a bar does not.
          const choose = () => onRange(least[at] ?? a, most[at] ?? b);
          const label = `${formatNumber(a)} to ${formatNumber(b)}: ${plural(number, "rollout")}`;
          return number ? (
            <rect
              key={at}
              class="bar"
              x={x(a) + 0.5}
              y={y(number)}
              width={Math.max(1, x(b) - x(a) - 1)}
              height={HEIGHT - 20 - y(number)}
              tabIndex={0}
              role="button"
              aria-label={label}
              onClick={choose}
              onKeyDown={(event) => event.key === "Enter" && choose()}
            >
              <title>{label}</title>
            </rect>
          ) : null;
        })}
        <BottomAxis scale={x} at={ticks(from, to, Math.max(2, width / 90))} width={width - 12} bottom={HEIGHT - 20} left={LEFT} />
      </svg>
      {share > 0 && <p class="note">{plural(data.missing, "rollout")} without a value.</p>}
    </figure>
  );
}

function Values({ data, onValue }: Omit<Props, "onRange">) {
  const values = (data.bins.value ?? []).map((value, at) => ({ value, count: data.bins.count[at] ?? 0 }));
  const most = Math.max(1, ...values.map((one) => one.count));
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{data.name}</span>
      </figcaption>
      <ul class="values">
        {values.slice(0, 20).map(({ value, count }) => (
          <li key={String(value)}>
            <button type="button" class="plain" onClick={() => onValue(String(value))}>
              {value === null || value === "" ? "(none)" : String(value)}
            </button>
            <meter min={0} max={most} value={count} aria-label={`${formatNumber(count)} rollouts`} />
            <span class="number">{formatNumber(count)}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
