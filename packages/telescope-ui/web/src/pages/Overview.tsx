import { Chart, type Mark, type Point, type Series } from "../components/Chart.tsx";
import { ChartTools } from "../components/ChartTools.tsx";
import { Facts } from "../components/Facts.tsx";
import { Happened, SelfTests } from "../components/Happened.tsx";
import { Link } from "../components/Link.tsx";
import { Metrics } from "../components/Metrics.tsx";
import { Sections } from "../components/Sections.tsx";
import { Spark } from "../components/Spark.tsx";
import { Empty, IndexNote, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { Findings, VerdictLine } from "../components/Verdict.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatByName, formatIso, formatNumber, formatSeconds, formatShare, isShare, plural, quotedWord } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import { extent } from "../lib/scales.ts";
import type { OverviewPage, RewardCourse, Tile } from "../lib/types.ts";
import { isZoomed, placeOf, seriesOf, viewOf, zoomed, type View } from "../lib/view.ts";

const PARTS = ["metrics", "rollouts", "evals", "restarts", "checkpoints", "state", "summary"];
/** Environments that have a chart each; of more there is a table. */
const MOST_CHARTS = 6;
/** Steps whose groups and rollouts are counted for the shares of an environment, as the server counts them. */
const NEWEST_STEPS = 10;

export function Overview({ address, query, run }: PageProps) {
  const loaded = useData<OverviewPage>(address, run, PARTS);
  return <Ready loaded={loaded}>{(data) => <Content data={data} address={address} query={query} />}</Ready>;
}

interface Shown {
  data: OverviewPage;
  address: string;
  query: URLSearchParams;
}

function Content({ data, address, query }: Shown) {
  const key = data.run.key;
  const view = viewOf(query);
  const started_s = Date.parse(data.identity.started_at ?? "") / 1000 || null;
  const reward = seriesOf("reward", courseOf(data.reward), view, started_s);
  const drawn: Drawn = {
    view,
    started_s,
    marks: marksOf(data, reward, view),
    usual: {
      group: "run",
      scale: view.scale,
      xName: view.isInHours ? "hour" : "step",
      domain: extent([reward.xs, data.evals.map((one) => placeOf(one.step, reward, view))]),
      isZoomed: isZoomed(view),
      onZoom: (steps) => go(zoomed(address, steps)),
      pickHint: "Enter opens the rollouts of the step",
    },
    onPick: (environment) => (step) =>
      go(withQuery(ofRun(key, "rollouts"), { step_from: step, step_to: step, environment })),
  };
  return (
    <>
      <div class="head">
        <h1>{data.run.name}</h1>
        <State state={data.run.state} />
        {data.identity.reason && <span class="faint">{data.identity.reason}</span>}
      </div>
      <VerdictLine verdict={data.verdict} />
      <IndexNote index={data.index} />
      <Findings run={key} findings={data.diagnoses} />
      <ChartTools
        address={address}
        query={query}
        view={view}
        smoothSteps={data.reward.smooth_steps}
        hasTimes={data.reward.times_s.some((one) => one !== null)}
      />
      <Rewards data={data} series={reward} drawn={drawn} />
      <Environments data={data} drawn={drawn} />
      <WhereTimeWent data={data} />
      <Identity data={data} />
      <Tiles tiles={data.tiles} />
      <AllMetrics data={data} address={address} query={query} drawn={drawn} />
      <Happened data={data} address={address} />
      <SelfTests data={data} />
    </>
  );
}

/** What the charts of the page have in common. */
interface Drawn {
  view: View;
  started_s: number | null;
  marks: Mark[];
  usual: Pick<Parameters<typeof Chart>[0], "group" | "scale" | "xName" | "domain" | "isZoomed" | "onZoom" | "pickHint">;
  onPick: (environment?: string) => (step: number) => void;
}

const courseOf = (one: RewardCourse) => ({ ...one, values: one.mean });

function Rewards({ data, series, drawn }: { data: OverviewPage; series: Series; drawn: Drawn }) {
  const { reward, rewards } = data;
  const { view } = drawn;
  if (!reward.steps.length) {
    return (
      <Empty>
        {isZoomed(view) ? "No step lies in the part that is shown." : "No step has ended yet, so there are no rewards."}
      </Empty>
    );
  }
  const names = rewards.map((one) => one.environment);
  const places = reward.untrained.flatMap(([from, to]) => {
    const [first, last] = [Math.max(from, series.steps?.[0] ?? from), Math.min(to, series.steps?.at(-1) ?? to)];
    const ends = [placeOf(first, series, view), placeOf(last, series, view)];
    return first <= last && ends[0] !== null && ends[1] !== null ? [ends as [number, number]] : [];
  });
  const points = pointsOf(data, series, view, names);
  return (
    <>
      <Chart
        {...drawn.usual}
        title={data.identity.algorithm === "sft" ? "Accuracy on held-out examples" : "Reward of training, all environments"}
        height={230}
        series={[{ ...series, color: 7 }]}
        bounds={reward.range}
        points={points}
        shaded={places}
        marks={drawn.marks}
        onPick={drawn.onPick()}
      />
      {(points.length > 0 || places.length > 0 || drawn.marks.length > 0) && (
        <ul class="legend">
          {[...new Set(points.map((one) => one.color))].map((color) => (
            <li key={color}>
              <i class={`swatch is-round series-${color % 8}`} /> eval of {names[color] ?? "another environment"}, 95% interval
            </li>
          ))}
          {places.length > 0 && (
            <li>
              <i class="swatch shaded" /> nothing was trained
            </li>
          )}
          {drawn.marks.length > 0 && (
            <li>
              <i class="swatch mark-swatch" /> restart
            </li>
          )}
        </ul>
      )}
    </>
  );
}

function pointsOf(data: OverviewPage, series: Series, view: View, names: string[]): Point[] {
  return data.evals.flatMap((one) => {
    const x = placeOf(one.step, series, view);
    const at = names.indexOf(one.environment);
    const point = { y: one.mean, low: one.low, high: one.high, label: `eval ${one.folder}`, color: at < 0 ? names.length : at };
    return x === null ? [] : [{ x, ...point }];
  });
}

function Environments({ data, drawn }: { data: OverviewPage; drawn: Drawn }) {
  const { rewards } = data;
  if (!rewards.length) return null;
  if (rewards.length > MOST_CHARTS) return <EnvironmentTable data={data} />;
  const range = extent(rewards.map((one) => one.range ?? []));
  const names = rewards.map((one) => one.environment);
  return (
    <div class="charts is-small">
      {rewards.map((one, at) => {
        const series = seriesOf(one.environment, courseOf(one), drawn.view, drawn.started_s);
        const points = pointsOf(data, series, drawn.view, names).filter((point) => point.color === at);
        return (
          <div key={one.environment}>
            <Chart
              {...drawn.usual}
              title={one.environment}
              height={120}
              series={[{ ...series, color: at }]}
              bounds={one.range && range}
              points={points}
              marks={drawn.marks}
              onPick={drawn.onPick(one.environment)}
            />
            <p class="faint under-chart">
              {changeOf(one)}
              {one.signal !== null && (
                <>
                  {" "}
                  In the newest {plural(Math.min(NEWEST_STEPS, data.identity.step ?? NEWEST_STEPS), "step")},{" "}
                  <Rollouts data={data} query={{ environment: one.environment, group: "signal" }}>
                    {formatShare(one.signal)} of groups
                  </Rollouts>{" "}
                  have a signal, and{" "}
                  <Rollouts data={data} query={{ environment: one.environment, truncated: true }}>
                    {formatShare(one.truncated)} of rollouts
                  </Rollouts>{" "}
                  were cut.
                </>
              )}
            </p>
          </div>
        );
      })}
    </div>
  );
}

function changeOf(one: RewardCourse): string {
  if (one.first === null || one.last === null) return "";
  const change = one.last - one.first;
  const steps = one.compared_steps === 1 ? "step" : `${one.compared_steps} steps`;
  const sign = change < 0 ? "" : "+";
  return `${one.first.toFixed(3)} in the first ${steps}, ${one.last.toFixed(3)} in the last (${sign}${change.toFixed(3)}).`;
}

/** A link to some of the newest rollouts. */
function Rollouts({ data, query, children }: { data: OverviewPage; query: Record<string, string | boolean>; children: preact.ComponentChildren }) {
  const since = Math.max(1, (data.identity.step ?? 0) - NEWEST_STEPS + 1);
  return <Link to={withQuery(ofRun(data.run.key, "rollouts"), { ...query, step_from: since })}>{children}</Link>;
}

function EnvironmentTable({ data }: { data: OverviewPage }) {
  return (
    <Table
      caption={`Reward of each environment; shares of the newest ${NEWEST_STEPS} steps`}
      rows={data.rewards}
      keyOf={(row) => row.environment}
      columns={[
        { name: "Environment", cell: (row) => row.environment },
        { name: "Reward", cell: (row) => <Spark xs={row.steps} ys={row.smooth.length ? row.smooth : row.mean} /> },
        { name: "First", isNumber: true, cell: (row) => formatNumber(row.first, 3) },
        { name: "Last", isNumber: true, cell: (row) => formatNumber(row.last, 3) },
        {
          name: "Change",
          isNumber: true,
          cell: (row) => (row.first === null || row.last === null ? "-" : formatNumber(row.last - row.first, 3)),
        },
        { name: "Groups with a signal", isNumber: true, cell: (row) => formatShare(row.signal) },
        { name: "Rollouts cut", isNumber: true, cell: (row) => formatShare(row.truncated) },
      ]}
    />
  );
}

function WhereTimeWent({ data }: { data: OverviewPage }) {
  const { parts, step_s, tokens_per_s, bound_by } = data.time;
  const whole = parts.reduce((sum, one) => sum + one.seconds, 0);
  if (!whole) return null;
  const told = [
    step_s.last === null ? "" : `${formatSeconds(step_s.last)} a step (${formatSeconds(step_s.first)} at first)`,
    tokens_per_s === null ? "" : `${formatNumber(Math.round(tokens_per_s))} tokens a second`,
    bound_by === null ? "" : `bound by ${bound_by}`,
  ].filter(Boolean);
  return (
    <section aria-label="Where the time went">
      <h2 class="is-line">
        Where the time went <span class="faint">{told.join(", ")}</span>
      </h2>
      <div class="stacked" aria-hidden="true">
        {parts.map((one, at) => (
          <i key={one.name} class={`series-${at}`} style={{ width: `${(100 * one.seconds) / whole}%` }} />
        ))}
      </div>
      <ul class="legend">
        {parts.map(
          (one, at) =>
            one.seconds > 0 && (
              <li key={one.name}>
                <i class={`swatch series-${at}`} /> {one.name} {formatShare(one.seconds / whole)}{" "}
                <span class="faint">({formatSeconds(one.seconds)})</span>
              </li>
            ),
        )}
      </ul>
    </section>
  );
}

function Identity({ data }: { data: OverviewPage }) {
  const one = data.identity;
  const key = data.run.key;
  const step = one.number_of_steps
    ? `${formatNumber(one.step)} of ${formatNumber(one.number_of_steps)}`
    : formatNumber(one.step);
  return (
    <>
      <Facts
        facts={[
          ["Step", step],
          ["Model", one.model ?? "-"],
          ["Algorithm", one.algorithm ?? "-"],
          ["Started", formatIso(one.started_at)],
          one.left_s === null ? ["Ended", formatIso(one.ended_at)] : ["Left", formatSeconds(one.left_s)],
          ["Host", one.host ?? "-"],
          ["Folder", <code key="folder">{one.folder}</code>],
        ]}
      />
      <p class="tools">
        {one.report && !exported() && (
          <a href={one.report} target="_blank" rel="noreferrer">
            Report
          </a>
        )}
        <Link to={ofRun(key, "config")}>Config</Link>
        <Link to={ofRun(key, "timeline")}>Timeline</Link>
        {!exported() && (
          <details class="in-line">
            <summary>Export</summary>
            <code>
              telescope ui {quotedWord(one.folder)} --export {quotedWord(`${key}.html`)} --one-file
            </code>
          </details>
        )}
      </p>
    </>
  );
}

function shownValue(tile: Tile): string {
  return tile.is_share && tile.value !== null ? `${formatNumber(100 * tile.value, 3)} %` : formatNumber(tile.value, 3);
}

function Tiles({ tiles }: { tiles: Tile[] }) {
  if (!tiles.length) return null;
  return (
    <>
      <h2>
        Health <span class="faint is-small">means over the newest 10 steps; a link lists what was counted</span>
      </h2>
      <ul class="tiles" aria-label="Health, over the newest steps">
        {tiles.map((tile) => (
          <li key={tile.name} class={`tile-${tile.state}`}>
            <div>
              {tile.address ? <Link to={tile.address}>{tile.name}</Link> : tile.name}
              {tile.state === "watch" && <span class="unseen"> (to be watched)</span>}
              {tile.state === "bad" && <b> - bad</b>}
            </div>
            <div>
              <span class="value">{tile.value === null ? "none" : shownValue(tile)}</span> <span class="faint">{tile.unit}</span>
            </div>
            <div class="why">{tile.explanation}</div>
          </li>
        ))}
      </ul>
    </>
  );
}

/** The metrics that were asked for, or the usual ones; and all there are, in sections. */
function AllMetrics({ data, address, query, drawn }: Shown & { drawn: Drawn }) {
  const { curves } = data;
  const asked = query.getAll("metric");
  const shown = (asked.length ? asked : data.usual).filter((name) => Object.hasOwn(curves.metrics, name));
  const chart = (name: string) => {
    const values = curves.metrics[name];
    if (!values) return <Empty key={name}>Loading {name}...</Empty>;
    const course = { steps: curves.steps, times_s: curves.times_s, values, smooth: curves.smooth[name] ?? [] };
    return (
      <Chart
        {...drawn.usual}
        key={name}
        title={name}
        format={(value) => formatByName(name, value)}
        most={isShare(name) ? 1 : undefined}
        series={[seriesOf(name, course, drawn.view, drawn.started_s)]}
        marks={drawn.marks}
        onPick={drawn.onPick()}
      />
    );
  };
  return (
    <>
      <h2>{asked.length ? "Chosen metrics" : "Usual metrics"}</h2>
      {!exported() && (
        <Metrics
          names={data.metric_names}
          shown={shown}
          onChange={(metric) => go(withQuery(address, { metric }), "replace")}
        />
      )}
      {asked.length > 0 && (
        <button type="button" onClick={() => go(withQuery(address, { metric: [] }), "replace")}>
          Show the usual ones
        </button>
      )}
      <div class="charts">{shown.map(chart)}</div>
      <h2>All metrics</h2>
      <Sections address={address} query={query} sections={data.sections} chart={chart} />
    </>
  );
}

function marksOf(data: OverviewPage, series: Series, view: View): Mark[] {
  return data.restarts.flatMap((one) => {
    const x = placeOf(one.reached, series, view);
    const label = `restart after step ${one.reached}, from step ${one.step}: ${one.reason}`;
    return x === null ? [] : [{ x, label, kind: "restart" }];
  });
}
