import { Chart, type Series } from "../components/Chart.tsx";
import { Link } from "../components/Link.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { Queues, Workers } from "../components/Workers.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatByName, formatDate, formatNumber, isShare } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { InfraPage } from "../lib/machineTypes.ts";

/** Sources of one chart: more curves than this are told apart by nobody. */
const MAX_CURVES = 8;

export function Infra({ address, query, run }: PageProps) {
  const loaded = useData<InfraPage>(address, run, ["gauges", "servers", "metrics"]);
  return (
    <>
      <h1>Infra</h1>
      <Ready loaded={loaded}>
        {(data) => (
          <>
            {!exported() && <Window address={address} data={data} query={query} />}
            <Servers data={data} run={run} />
            {data.extent === null && (
              <Empty>
                No meters are recorded. A run reads them each <code>system_metrics_collection_interval_seconds</code>; 0
                turns that off.
              </Empty>
            )}
            <Outliers data={data} address={address} />
            <Queues data={data} />
            <Workers data={data} />
            <Latest data={data} address={address} />
            <Fleet data={data} />
            <Meters data={data} />
          </>
        )}
      </Ready>
    </>
  );
}

const WINDOWS: [string, number][] = [
  ["5 minutes", 300],
  ["1 hour", 3600],
  ["6 hours", 21_600],
  ["24 hours", 86_400],
];

function Window({ address, data, query }: { address: string; data: InfraPage; query: URLSearchParams }) {
  const to = data.extent?.to;
  const sources = query.getAll("source");
  return (
    <div class="tools">
      <span class="faint">The last</span>
      {to !== undefined &&
        WINDOWS.map(([label, seconds]) => (
          <button type="button" key={label} onClick={() => go(withQuery(address, { from: Math.max(0, to - seconds), to }), "replace")}>
            {label}
          </button>
        ))}
      <button type="button" aria-pressed={!query.has("from")} onClick={() => go(withQuery(address, { from: null, to: null }), "replace")}>
        the whole run
      </button>
      {sources.length > 0 && (
        <button type="button" onClick={() => go(withQuery(address, { source: null }), "replace")}>
          All sources instead of {sources.join(", ")}
        </button>
      )}
    </div>
  );
}

function Servers({ data, run }: { data: InfraPage; run: string }) {
  if (!data.servers.length) return null;
  return (
    <>
      <h2>Inference servers</h2>
      <Table
        caption="Inference servers"
        rows={data.servers}
        keyOf={(row) => row.server}
        columns={[
          { name: "Server", cell: (row) => <Link to={withQuery(ofRun(run, "infra"), { source: row.server })}>{row.server}</Link> },
          { name: "For", cell: (row) => row.role },
          { name: "State", cell: (row) => <State state={row.state} /> },
          { name: "Since", cell: (row) => <span class="number">{formatDate(row.since_s)}</span> },
          { name: "Version", isNumber: true, cell: (row) => formatNumber(row.version) },
          { name: "Starts", isNumber: true, cell: (row) => formatNumber(row.num_lives) },
          { name: "Reason", cell: (row) => <span class="faint">{row.reason}</span> },
        ]}
      />
    </>
  );
}

function Outliers({ data, address }: { data: InfraPage; address: string }) {
  if (!data.outliers.length) return null;
  return (
    <>
      <h2>Sources that differ from the others</h2>
      <Table
        caption="Sources that differ from the others"
        rows={data.outliers}
        keyOf={(row) => row.source + row.name}
        columns={[
          { name: "Source", cell: (row) => <Link to={withQuery(address, { source: row.source })}>{row.source}</Link> },
          { name: "Meter", cell: (row) => row.name },
          { name: "Value", isNumber: true, cell: (row) => formatByName(row.name, row.value) },
          { name: "Median of all", isNumber: true, cell: (row) => formatByName(row.name, row.median) },
          { name: "Deviations", isNumber: true, cell: (row) => formatNumber(row.deviations, 3) },
        ]}
      />
    </>
  );
}

/** What all sources of a kind show now, as one table for each kind. */
function Latest({ data, address }: { data: InfraPage; address: string }) {
  const kinds = [...new Set(data.sources.map((one) => one.kind))];
  return (
    <>
      {kinds.map((kind) => {
        const sources = data.sources.filter((one) => one.kind === kind);
        const names = [...new Set(sources.flatMap((one) => Object.keys(one.latest)))].sort();
        return (
          <details key={kind} open={sources.length <= 16}>
            <summary>
              Newest readings: {kind} ({sources.length})
            </summary>
            <Table
              caption={`Newest readings of every ${kind}`}
              rows={sources.slice(0, 2000)}
              keyOf={(row) => row.source}
              columns={[
                { name: "Source", cell: (row) => <Link to={withQuery(address, { source: row.source })}>{row.source}</Link> },
                ...names.map((name) => ({
                  name,
                  label: name.replace("/", " / "),
                  isNumber: true,
                  cell: (row: (typeof sources)[number]) => formatByName(name, row.latest[name]),
                })),
              ]}
            />
          </details>
        );
      })}
    </>
  );
}

function Fleet({ data }: { data: InfraPage }) {
  if (!data.fleet.length) return null;
  return (
    <>
      <h2>All GPUs: median, and the middle 80%</h2>
      <div class="charts">
        {data.fleet.map((one) => (
          <Chart
            key={one.kind + one.name}
            title={one.name}
            isTime
            isBytes={one.name.includes("_bytes")}
            format={(value) => formatByName(one.name, value)}
            bounds={isShare(one.name) ? [0, 1] : null}
            series={[{ name: "median", xs: one.times_s, ys: one.p50, low: one.p10, high: one.p90 }]}
          />
        ))}
      </div>
    </>
  );
}

interface Panel {
  title: string;
  name: string;
  series: Series[];
}

function Meters({ data }: { data: InfraPage }) {
  if (!data.series.length) return null;
  return (
    <>
      <h2>Meters</h2>
      <div class="charts">
        {panels(data).map((panel) => (
          <Chart
            key={panel.title}
            title={panel.title}
            isTime
            height={150}
            isBytes={panel.name.includes("_bytes")}
            format={(value) => formatByName(panel.name, value)}
            bounds={isShare(panel.name) ? [0, 1] : null}
            series={panel.series}
          />
        ))}
      </div>
    </>
  );
}

/** One chart for each meter, and for each eight sources of it. */
function panels(data: InfraPage): Panel[] {
  const found: Panel[] = [];
  for (const name of data.names) {
    const of = data.series.filter((one) => one.name === name);
    for (let first = 0; first < of.length; first += MAX_CURVES) {
      const part = of.slice(first, first + MAX_CURVES);
      const count = of.length > MAX_CURVES ? ` (${first + 1} to ${first + part.length})` : "";
      found.push({
        title: `${name}${count}`,
        name,
        series: part.map((one) => ({ name: one.source, xs: one.times_s, ys: one.mean, low: one.minimum, high: one.maximum })),
      });
    }
  }
  return found;
}
