import { Chart, type Mark } from "../components/Chart.tsx";
import { Facts } from "../components/Facts.tsx";
import { Link } from "../components/Link.tsx";
import { Metrics } from "../components/Metrics.tsx";
import { Empty, IndexNote, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatAgo, formatByName, formatDate, formatIso, formatNumber, isShare } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { OverviewPage, Tile } from "../lib/types.ts";

const PARTS = ["metrics", "rollouts", "evals", "restarts", "checkpoints", "state", "summary"];

export function Overview({ address, run }: PageProps) {
  const loaded = useData<OverviewPage>(address, run, PARTS);
  return <Ready loaded={loaded}>{(data) => <Content data={data} address={address} />}</Ready>;
}

function Content({ data, address }: { data: OverviewPage; address: string }) {
  const key = data.run.key;
  const shown = Object.keys(data.curves.metrics);
  const marks = marksOf(data);
  const openStep = (environment?: string) => (step: number) =>
    go(withQuery(ofRun(key, "rollouts"), { step_from: step, step_to: step, environment }));
  return (
    <>
      <div class="head">
        <h1>{data.run.name}</h1>
        <State state={data.run.state} />
        {data.identity.reason && <span class="faint">{data.identity.reason}</span>}
      </div>
      <IndexNote index={data.index} />
      <Identity data={data} />
      <Tiles tiles={data.tiles} />
      <Diagnoses data={data} />
      <h2>Rewards</h2>
      {data.rewards.length === 0 && (
        <Empty>
          {data.index.is_complete
            ? "The first step has not ended yet, so there are no rewards."
            : "The index of the run is being made; rewards appear with the first steps that are in it."}
        </Empty>
      )}
      <div class="charts">
        {data.rewards.map((one, at) => (
          <Chart
            key={one.environment}
            title={`${one.environment}: mean reward, 95% interval over groups`}
            series={[{ name: one.environment, xs: one.steps, ys: one.mean, low: one.low, high: one.high, color: at }]}
            marks={marks}
            onPick={openStep(one.environment)}
            pickHint="Enter opens the rollouts of the step"
          />
        ))}
      </div>
      <h2>Metrics</h2>
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
            series={[{ name, xs: data.curves.steps, ys: data.curves.metrics[name] ?? [] }]}
            marks={marks}
            onPick={openStep()}
            pickHint="Enter opens the rollouts of the step"
          />
        ))}
      </div>
      {marks.length > 0 && (
        <p class="note">Dashed lines are evals; solid lines are restarts. A click on a curve opens the rollouts of that step.</p>
      )}
      <Happened data={data} />
      <SelfTests data={data} />
    </>
  );
}

function Identity({ data }: { data: OverviewPage }) {
  const one = data.identity;
  const step = one.number_of_steps
    ? `${formatNumber(one.step)} of ${formatNumber(one.number_of_steps)}`
    : formatNumber(one.step);
  return (
    <Facts
      facts={[
        ["Step", step],
        ["Model", one.model ?? "-"],
        ["Algorithm", one.algorithm ?? "-"],
        ["Started", formatIso(one.started_at)],
        ["Ended", formatIso(one.ended_at)],
        ["Last change", formatAgo(one.last_change_s)],
        ["Host", one.host ?? "-"],
        ["Folder", <code key="folder">{one.folder}</code>],
      ]}
    />
  );
}

function shownValue(tile: Tile): string {
  return tile.is_share && tile.value !== null ? `${formatNumber(100 * tile.value, 3)} %` : formatNumber(tile.value, 3);
}

function Tiles({ tiles }: { tiles: Tile[] }) {
  if (!tiles.length) return null;
  return (
    <>
      <ul class="tiles" aria-label="Health, over the newest steps">
        {tiles.map((tile) => (
          <li key={tile.name} class={`tile-${tile.state}`}>
            <div>
              {tile.address ? <Link to={tile.address}>{tile.name}</Link> : tile.name}
              {tile.state === "watch" && <span class="unseen"> (to be watched)</span>}
              {tile.state === "bad" && <b> - bad</b>}
            </div>
            <div>
              <span class="value">{shownValue(tile)}</span> <span class="faint">{tile.unit}</span>
            </div>
            <div class="why">{tile.explanation}</div>
          </li>
        ))}
      </ul>
      <p class="faint">Means over the newest 10 steps; a link lists what was counted.</p>
    </>
  );
}

/** What the rules of `telescope doctor` find wrong, and what to do about it. */
function Diagnoses({ data }: { data: OverviewPage }) {
  if (!data.diagnoses.length) return null;
  return (
    <>
      <h2>What is wrong</h2>
      <Table
        caption="What is wrong, by the rules of telescope doctor"
        rows={data.diagnoses}
        keyOf={(row) => `${row.rule} ${row.environment} ${row.metrics[0]}`}
        columns={[
          { name: "Finding", cell: (row) => (row.environment === null ? row.rule : `${row.rule} in ${row.environment}`) },
          { name: "Kind", cell: (row) => <span class={row.kind === "slow" ? "faint" : "bad"}>{row.kind}</span> },
          {
            name: "Steps",
            cell: (row) => (
              <Link
                to={withQuery(ofRun(data.run.key, "rollouts"), {
                  ...row.rollouts,
                  step_from: row.first_step,
                  step_to: row.last_step,
                })}
              >
                {row.is_over ? `${row.first_step} to ${row.last_step}` : `since ${row.first_step}`}
              </Link>
            ),
          },
          { name: "What is seen", cell: (row) => row.cause },
          { name: "What to do", cell: (row) => row.remedy },
          {
            name: "Curves",
            cell: (row) => <Link to={withQuery(ofRun(data.run.key), { metric: row.metrics })}>{row.metrics[0]}</Link>,
          },
        ]}
      />
    </>
  );
}

function marksOf(data: OverviewPage): Mark[] {
  const evals = data.eval_points.map((point) => ({
    x: point.version,
    label: `eval ${point.name} ${point.tag}: ${point.reward === null ? point.state : formatNumber(point.reward)}`,
    kind: "eval",
  }));
  const restarts = data.restarts.map((one) => ({
    x: one.reached,
    label: `restart after step ${one.reached}, from step ${one.step}: ${one.reason}`,
    kind: "restart",
  }));
  return [...evals, ...restarts];
}

function Happened({ data }: { data: OverviewPage }) {
  const { restarts, checkpoints, identity } = data;
  const rows = [
    ...restarts.map((one) => ({
      time: formatDate(one.time_s),
      what: `The trainer was started again from step ${one.step}; it had reached step ${one.reached}.`,
      why: one.reason,
    })),
    ...identity.resumes.map((one) => ({
      time: formatIso(one.at),
      what: `Resumed from step ${one.step} (${one.checkpoint}).`,
      why: one.changed.length ? `changed: ${one.changed.join(", ")}` : "",
    })),
    ...checkpoints.map((one) => ({ time: formatIso(one.created_at), what: `Checkpoint ${one.name}`, why: "" })),
  ].sort((a, b) => (a.time < b.time ? 1 : -1));
  if (!rows.length) return null;
  return (
    <>
      <h2>What happened</h2>
      <Table
        caption="Restarts, resumes and checkpoints"
        rows={rows}
        keyOf={(_, at) => at}
        columns={[
          { name: "Time", cell: (row) => <span class="number">{row.time}</span> },
          { name: "What", cell: (row) => row.what },
          { name: "Why", cell: (row) => row.why },
        ]}
      />
    </>
  );
}

function SelfTests({ data }: { data: OverviewPage }) {
  if (!data.self_tests.length) return null;
  return (
    <>
      <h2>What the run proved before it began</h2>
      <Table
        caption="Self-tests"
        rows={data.self_tests}
        keyOf={(row) => row.name}
        columns={[
          { name: "Check", cell: (row) => row.name },
          { name: "Value", isNumber: true, cell: (row) => formatNumber(row.value) },
          { name: "Limit", isNumber: true, cell: (row) => formatNumber(row.limit) },
          { name: "Unit", cell: (row) => row.unit },
          { name: "Note", cell: (row) => <span class="faint">{row.note}</span> },
        ]}
      />
    </>
  );
}
