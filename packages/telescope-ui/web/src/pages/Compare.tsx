import { Chart } from "../components/Chart.tsx";
import { Link } from "../components/Link.tsx";
import { Metrics } from "../components/Metrics.tsx";
import { SharedExamples } from "../components/SharedExamples.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatByName, formatCell, formatNumber, plural, isShare } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { ComparePage } from "../lib/types.ts";

export function Compare({ address }: PageProps) {
  const loaded = useData<ComparePage>(address, "", ["metrics"]);
  return (
    <Ready loaded={loaded}>
      {(data) => {
        const shown = Object.keys(data.curves);
        const keys = data.runs.map((run) => run.key);
        return (
          <>
            <div class="head">
              <h1>Compare {plural(keys.length, "run")}</h1>
            </div>
            <ul class="legend">
              {data.runs.map((run, at) => (
                <li key={run.key}>
                  <i class={`swatch series-${at % 8}`} /> <Link to={ofRun(run.key)}>{run.name}</Link>{" "}
                  <State state={run.state} /> <span class="faint">step {formatNumber(run.step)}</span>
                </li>
              ))}
            </ul>
            {!exported() && (
              <Metrics
                names={data.metric_names}
                shown={shown}
                onChange={(metric) => go(withQuery(address, { metric }), "replace")}
              />
            )}
            <div class="charts">
              {shown.map((name) => (
                <Chart
                  key={name}
                  title={name}
                  format={(value) => formatByName(name, value)}
                  most={isShare(name) ? 1 : undefined}
                  series={(data.curves[name] ?? []).map((one) => ({
                    name: one.run,
                    xs: one.steps,
                    ys: one.values,
                    color: keys.indexOf(one.run),
                  }))}
                  onPick={(step, one) => go(withQuery(ofRun(one.name, "rollouts"), { step_from: step, step_to: step }))}
                  pickHint="Enter opens the rollouts of the step"
                />
              ))}
            </div>
            {!exported() && <SharedExamples runs={data.runs} />}
            <h2>Settings that differ</h2>
            {data.settings.length === 0 && <Empty>All {data.num_equal_settings} settings are the same.</Empty>}
            {data.settings.length > 0 && (
              <Table
                caption="Settings that differ"
                rows={data.settings}
                keyOf={(row) => row.name}
                columns={[
                  { name: "Setting", cell: (row) => <code>{row.name}</code> },
                  ...data.runs.map((run) => ({
                    name: run.key,
                    label: run.name,
                    cell: (row: (typeof data.settings)[number]) =>
                      Object.hasOwn(row.values, run.key) ? formatCell(row.values[run.key]) : <span class="faint">not set</span>,
                  })),
                ]}
              />
            )}
            <p class="note">{plural(data.num_equal_settings, "other setting")} are the same.</p>
          </>
        );
      }}
    </Ready>
  );
}
