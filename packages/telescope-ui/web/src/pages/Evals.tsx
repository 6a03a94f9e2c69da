import { Chart, type Point } from "../components/Chart.tsx";
import { Link } from "../components/Link.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table, type Column } from "../components/Table.tsx";
import { useData } from "../lib/data.ts";
import { formatNumber, formatSeconds } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { go } from "../lib/router.ts";
import type { Estimate, EvalPoint, EvalsPage, Verdict } from "../lib/evalTypes.ts";

export function Evals({ address, run }: PageProps) {
  const loaded = useData<EvalsPage>(address, run, ["evals"]);
  return (
    <>
      <h1>Evals</h1>
      <Ready loaded={loaded}>
        {({ evals }) => (
          <>
            {evals.length === 0 && (
              <Empty>
                This run has no evals. <code>evals</code> in its settings, with <code>eval_every</code>, plays held-out
                examples while it trains.
              </Empty>
            )}
            {evals.map((one) => (
              <section key={one.name}>
                <h2>{one.name}</h2>
                <Said points={one.points} />
                <Curve name={one.name} points={one.points} />
                <Points name={one.name} points={one.points} />
              </section>
            ))}
          </>
        )}
      </Ready>
    </>
  );
}

/** What the newest result says of all the training before it. */
function Said({ points }: { points: EvalPoint[] }) {
  const last = points.findLast((point) => point.mean !== null);
  if (!last) return null;
  if (!last.versus_first) return <p class="note">A second result is needed to say whether anything changed.</p>;
  return (
    <p class={last.versus_first.is_shown ? "verdict" : "verdict faint"}>
      {last.versus_first.sentence}, from {last.versus_first.against} to {last.folder}.
    </p>
  );
}

/** The ends of the axis, with room for whiskers at both. */
function around(xs: number[]): [number, number] {
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const room = Math.max(0.02 * (last - first), 0.5);
  return [first - room, last + room];
}

/** From so many results on, a band says more than as many whiskers. */
const MANY = 12;

function Curve({ name, points }: { name: string; points: EvalPoint[] }) {
  const done = points.filter((point) => point.mean !== null && point.version !== null);
  const measure = done[0]?.measure ?? "reward";
  const xs = done.map((point) => point.version ?? 0);
  const whiskers: Point[] = done.map((point) => ({
    x: point.version ?? 0,
    y: point.mean ?? 0,
    low: point.low,
    high: point.high,
    label: `${measure} ${point.tag}`,
    color: 0,
  }));
  const intervals = { low: done.map((point) => point.low), high: done.map((point) => point.high) };
  return (
    <Chart
      title={`${name}: ${measure}, 95% interval over examples`}
      xName="version"
      bounds={measure.startsWith("pass") ? [0, 1] : null}
      scale="fit"
      domain={xs.length > 1 ? around(xs) : null}
      series={[{ name: measure, xs, ys: done.map((point) => point.mean), ...(done.length > MANY ? intervals : {}) }]}
      points={done.length > MANY ? [] : whiskers}
      onPick={(version) => {
        const found = done.find((point) => point.version === version);
        if (found?.address) go(found.address);
      }}
      pickHint="Enter opens the eval"
    />
  );
}

export function VerdictText({ verdict }: { verdict: Verdict | null }) {
  if (!verdict) return <span class="faint">-</span>;
  const sign = verdict.change > 0 ? "+" : "";
  const text = `${sign}${formatNumber(verdict.change, 3)}`;
  if (!verdict.is_shown) return <span class="faint" title={verdict.sentence}>{text}, not shown</span>;
  return <b title={verdict.sentence}>{text}, shown</b>;
}

function Points({ name, points }: { name: string; points: EvalPoint[] }) {
  const ks = [...new Set(points.flatMap((point) => Object.keys(point.pass_at)))].sort((a, b) => Number(a) - Number(b));
  const passes = ks.map(
    (k): Column<EvalPoint> => ({
      name: `pass@${k}`,
      isNumber: true,
      cell: (point) => <Interval value={point.pass_at[k] ?? null} />,
    }),
  );
  return (
    <Table
      caption={`Points of the eval ${name}`}
      rows={points}
      keyOf={(point) => point.folder ?? `${point.tag} ${point.time_s}`}
      columns={[
        { name: "Eval", cell: (point) => (point.address ? <Link to={point.address}>{point.tag}</Link> : point.tag) },
        { name: "State", cell: (point) => <State state={point.state} /> },
        { name: "Version", isNumber: true, cell: (point) => formatNumber(point.version) },
        ...passes,
        { name: "Mean reward", isNumber: true, cell: (point) => <Interval value={point.reward} /> },
        { name: "Since the first", cell: (point) => <VerdictText verdict={point.versus_first} /> },
        { name: "Since the one before", cell: (point) => <VerdictText verdict={point.versus_previous} /> },
        { name: "Examples", isNumber: true, cell: (point) => formatNumber(point.num_tasks) },
        { name: "Failed", isNumber: true, cell: (point) => formatNumber(point.num_failed) },
        { name: "Took", isNumber: true, cell: (point) => formatSeconds(point.duration_s) },
        { name: "Reason", cell: (point) => <span class="faint">{point.reason}</span> },
      ]}
    />
  );
}

function Interval({ value }: { value: Estimate | null }) {
  if (!value) return <>-</>;
  return (
    <>
      {formatNumber(value.mean, 3)}{" "}
      <span class="faint">
        ({formatNumber(value.low, 3)} to {formatNumber(value.high, 3)})
      </span>
    </>
  );
}
