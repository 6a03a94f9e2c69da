import { Chart } from "../components/Chart.tsx";
import { ChartTools } from "../components/ChartTools.tsx";
import { Link } from "../components/Link.tsx";
import { Metrics } from "../components/Metrics.tsx";
import { Sections } from "../components/Sections.tsx";
import { SharedExamples } from "../components/SharedExamples.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { VerdictLine } from "../components/Verdict.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatByName, formatCell, formatNumber, isShare, nameOfRun, plural } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import { extent } from "../lib/scales.ts";
import type { ComparePage } from "../lib/types.ts";
import { isZoomed, seriesOf, viewOf, zoomed } from "../lib/view.ts";

export function Compare({ address, query }: PageProps) {
  const loaded = useData<ComparePage>(address, "", ["metrics"]);
  return <Ready loaded={loaded}>{(data) => <Content data={data} address={address} query={query} />}</Ready>;
}

interface Shown {
  data: ComparePage;
  address: string;
  query: URLSearchParams;
}

function Content({ data, address, query }: Shown) {
  return (
    <>
      <div class="head">
        <h1>Compare {plural(data.runs.length, "run")}</h1>
      </div>
      {data.runs.map((run, at) => (
        <section key={run.key} aria-label={nameOfRun(run)}>
          <p class="crumbs">
            <i class={`swatch series-${at % 8}`} /> <Link to={ofRun(run.key)}>{nameOfRun(run)}</Link> <State state={run.state} /> step{" "}
            {formatNumber(run.step)}
          </p>
          <VerdictLine verdict={run.verdict} />
        </section>
      ))}
      <ComparedEvals data={data} />
      <Settings data={data} />
      <Curves data={data} address={address} query={query} />
      {!exported() && <SharedExamples runs={data.runs} />}
    </>
  );
}

function ComparedEvals({ data }: { data: ComparePage }) {
  if (!data.evals.length) return null;
  const nameOf = (key: string) => {
    const run = data.runs.find((one) => one.key === key);
    return run ? nameOfRun(run) : key;
  };
  const rows = data.evals.flatMap((one) => one.runs.map((of, at) => ({ ...of, environment: one.environment, against: one.against, isFirst: at === 0 })));
  return (
    <>
      <h2>Newest evals</h2>
      <Table
        caption="The newest eval of each environment in each run"
        rows={rows}
        keyOf={(row) => `${row.environment} ${row.run}`}
        columns={[
          { name: "Environment", cell: (row) => (row.isFirst ? row.environment : "") },
          { name: "Run", cell: (row) => nameOf(row.run) },
          { name: "Eval", cell: (row) => row.moment },
          { name: "Measure", cell: (row) => row.measure },
          { name: "Value", isNumber: true, cell: (row) => formatNumber(row.mean, 3) },
          {
            name: "95% interval",
            isNumber: true,
            cell: (row) => (row.low === null || row.high === null ? "-" : `${formatNumber(row.low, 3)} to ${formatNumber(row.high, 3)}`),
          },
          {
            name: `By example, against ${nameOf(rows[0]?.against ?? "")}`,
            cell: (row) =>
              row.versus === null ? (
                <span class="faint">{row.isFirst ? "" : "no example in common"}</span>
              ) : (
                <span class="sentence">
                  {row.versus.is_shown && !row.versus.cautions.length ? <b>{row.versus.sentence}</b> : row.versus.sentence}{" "}
                  <span class="faint">{row.versus.cautions.join(" ")}</span>
                </span>
              ),
          },
        ]}
      />
    </>
  );
}

type Setting = ComparePage["settings"][number];

function Settings({ data }: { data: ComparePage }) {
  const own = data.settings.filter((one) => !one.is_place);
  const places = data.settings.filter((one) => one.is_place);
  return (
    <>
      <h2>Settings that differ</h2>
      {own.length === 0 && <Empty>No setting differs that changes what is trained.</Empty>}
      {own.length > 0 && <SettingTable caption="Settings that differ" rows={own} data={data} />}
      {places.length > 0 && (
        <details>
          <summary>{plural(places.length, "name, folder or port", "names, folders and ports")} that {places.length === 1 ? "differs" : "differ"}</summary>
          <SettingTable caption="Names, folders and ports that differ" rows={places} data={data} />
        </details>
      )}
      <p class="note">
        {plural(data.num_equal_settings, "other setting")} {data.num_equal_settings === 1 ? "is" : "are"} the same.{" "}
        <code>telescope compare</code> pairs the rewards of training of two runs step by
        step, too.
      </p>
    </>
  );
}

function SettingTable({ caption, rows, data }: { caption: string; rows: Setting[]; data: ComparePage }) {
  return (
    <Table
      caption={caption}
      rows={rows}
      keyOf={(row) => row.name}
      columns={[
        {
          name: "Setting",
          cell: (row) => (
            <>
              <code>{row.name}</code>
              {row.follows && <div class="faint">nobody set it: it follows from others</div>}
            </>
          ),
        },
        ...data.runs.map((run) => ({
          name: run.key,
          label: nameOfRun(run),
          cell: (row: Setting) =>
            Object.hasOwn(row.values, run.key) ? formatCell(row.values[run.key]) : <span class="faint">not set</span>,
        })),
      ]}
    />
  );
}

function Curves({ data, address, query }: Shown) {
  const view = viewOf(query);
  const keys = data.runs.map((run) => run.key);
  const startOf = (key: string) => data.runs.find((run) => run.key === key)?.started_s ?? null;
  const rewards = data.rewards.map((one) => ({
    environment: one.environment,
    range: one.runs[0]?.range ?? null,
    series: one.runs.map((of) => ({
      ...seriesOf(of.run, { ...of, values: of.mean, low: [], high: [] }, view, startOf(of.run)),
      color: keys.indexOf(of.run),
    })),
  }));
  const usual = {
    group: "compared",
    scale: view.scale,
    xName: view.isInHours ? "hour" : "step",
    domain: extent((rewards[0]?.series ?? []).map((one) => one.xs)),
    isZoomed: isZoomed(view),
    onZoom: (steps: [number, number] | null) => go(zoomed(address, steps)),
    onPick: (step: number, one: { name: string }) =>
      go(withQuery(ofRun(one.name, "rollouts"), { step_from: step, step_to: step })),
    pickHint: "Enter opens the rollouts of the step",
  };
  const asked = query.getAll("metric");
  const shown = (asked.length ? asked : data.usual).filter((name) => Object.hasOwn(data.curves, name));
  const chart = (name: string) => (
    <Chart
      {...usual}
      key={name}
      title={name}
      format={(value) => formatByName(name, value)}
      most={isShare(name) ? 1 : undefined}
      series={(data.curves[name] ?? []).map((one) => ({ ...seriesOf(one.run, one, view, startOf(one.run)), color: keys.indexOf(one.run) }))}
    />
  );
  const courses = data.rewards.flatMap((one) => one.runs);
  return (
    <>
      <h2>Reward</h2>
      <ChartTools
        address={address}
        query={query}
        view={view}
        smoothSteps={Math.max(1, ...courses.map((one) => one.smooth_steps))}
        hasTimes={courses.some((one) => one.times_s.some((time_s) => time_s !== null))}
      />
      {rewards.slice(0, 1).map((one) => (
        <Chart {...usual} key="all" title="Reward of training, all environments" height={230} series={one.series} bounds={one.range} />
      ))}
      <div class="charts">
        {rewards.slice(1).map((one) => (
          <Chart {...usual} key={one.environment} title={one.environment ?? ""} series={one.series} bounds={one.range} />
        ))}
      </div>
      <h2>{asked.length ? "Chosen metrics" : "Usual metrics"}</h2>
      {!exported() && (
        <Metrics names={data.metric_names} shown={shown} onChange={(metric) => go(withQuery(address, { metric }), "replace")} />
      )}
      <div class="charts">{shown.map(chart)}</div>
      <h2>All metrics</h2>
      <Sections address={address} query={query} sections={data.sections} chart={chart} />
    </>
  );
}
