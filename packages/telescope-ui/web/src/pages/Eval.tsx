import { Facts } from "../components/Facts.tsx";
import { TextSearch } from "../components/Filters.tsx";
import { Link } from "../components/Link.tsx";
import { LongTable } from "../components/LongTable.tsx";
import { Search, type Progress } from "../components/Search.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { dataAddress, ofRun, parseAddress, withQuery } from "../lib/address.ts";
import { rowsOf } from "../lib/columns.ts";
import { useData } from "../lib/data.ts";
import { formatCell, formatNumber, formatSeconds, nameOfRun, plural } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { EvalPage, EvalRolloutsPage } from "../lib/evalTypes.ts";
import { visible } from "../lib/visible.ts";

/** Parameter of the page: what is searched in conversations. */
const SAID = "ui.q";
const MEASURES = [["pass_at", "pass@"], ["majority_at", "maj@"], ["pass_all", "pass^"]] as const;

interface Flip {
  example_id: string;
  before: number;
  after: number;
  change: number;
  address_before: string;
  address_after: string;
}

interface Task {
  example_id: string;
  mean: number | null;
  /** Null before there is a result, which knows from which reward on an example is solved. */
  num_solved: number | null;
  num_rollouts: number;
  num_failed: number;
  address: string;
}

export function Eval({ address, run }: PageProps) {
  const loaded = useData<EvalPage>(dataAddress(address), run, ["evals"]);
  return (
    <Ready loaded={loaded}>
      {(data) => (
        <>
          <p class="crumbs">
            {isAlone(data) ? <Link to="/">all runs and evals</Link> : <Link to={ofRun(run, "evals")}>evals</Link>} /{" "}
            {data.environment}
          </p>
          <div class="head">
            <h1>{titleOf(data, data.folder)}</h1>
            {isAlone(data) && data.run.state && <State state={data.run.state} />}
            {isAlone(data) && <Link to={`${data.address}/logs`}>logs</Link>}
          </div>
          <Result data={data} />
          {data.others.length > 0 && !exported() && (
            <div class="tools">
              <label>
                Compared to
                <select
                  value={data.against ?? ""}
                  onChange={(event) => go(withQuery(address, { against: event.currentTarget.value }), "replace")}
                >
                  {data.against === null && <option value="">none</option>}
                  {data.others.map((one) => (
                    <option key={one} value={one}>
                      {titleOf(data, one)}
                    </option>
                  ))}
                </select>
              </label>
            </div>
          )}
          {data.verdicts.map((verdict, at) => (
            <p key={verdict.measure} class={at ? undefined : "verdict"}>
              {verdict.sentence}
            </p>
          ))}
          {data.cautions.map((caution) => (
            <p key={caution} class="note">
              {caution}
            </p>
          ))}
          <Conversations data={data} address={address} />
          <Flips data={data} address={address} />
          <Tasks data={data} address={address} />
          <Settings settings={data.settings} />
        </>
      )}
    </Ready>
  );
}

const titleOf = (data: EvalPage, key: string) => visible(nameOfRun({ key, name: data.titles[key] ?? key }));

/** Whether it belongs to no run. */
const isAlone = (data: EvalPage) => data.address.startsWith("/evals/");

interface Interval {
  mean: number;
  low: number;
  high: number;
}

function interval(value: unknown): string {
  const found = value as Interval | null | undefined;
  if (!found || typeof found.mean !== "number") return "-";
  return `${formatNumber(found.mean, 3)} (${formatNumber(found.low, 3)} to ${formatNumber(found.high, 3)})`;
}

function Result({ data }: { data: EvalPage }) {
  const { result, so_far } = data;
  if (!result) {
    const { example_indices, rollouts } = data.settings as { example_indices?: number[]; rollouts?: number };
    const planned = (example_indices?.length ?? 0) * (rollouts ?? 0);
    const ended = isAlone(data) && data.run.state !== "running" ? data.run.state : null;
    return (
      <p class="note" role="status">
        There is no result {data.problems.length || ended ? "to show" : "yet"}
        {ended && `, since the eval is ${ended}`}: {formatNumber(so_far.num_scored)} of {plural(so_far.num_rollouts, "rollout")} so far
        {planned ? `, of ${formatNumber(planned)} in all,` : ""} are scored
        {so_far.reward !== null && `, with a mean reward of ${formatNumber(so_far.reward, 3)}`}.
        {ended && " To play the rest, repeat its command with --resume."}
      </p>
    );
  }
  const passes = MEASURES.flatMap(([field, name]) =>
    Object.entries((result[field] ?? {}) as Record<string, unknown>)
      .filter(([k]) => field === "pass_at" || Number(k) > 1)
      .map(([k, value]): [string, string] => [`${name}${k}`, interval(value)]),
  );
  return (
    <Facts
      facts={[
        isAlone(data) ? ["Model", String(result["model"])] : ["Weights", data.version === null ? "-" : `version ${data.version}`],
        ["Reward", interval(result["reward"])],
        ...passes,
        ["Examples", formatNumber(result["num_tasks"] as number)],
        ["Rollouts", formatNumber(result["num_rollouts"] as number)],
        ["Failed", formatNumber(result["num_failed"] as number)],
        ["Truncated", formatNumber(result["num_truncated"] as number)],
        ["Took", formatSeconds(result["duration_s"] as number)],
        ...(result["num_earlier"] ? [["Before it was resumed", plural(result["num_earlier"] as number, "rollout")] as [string, string]] : []),
      ]}
    />
  );
}

/** A search in what was said; an export has no server that could search. */
function Conversations({ data, address }: { data: EvalPage; address: string }) {
  const { query } = parseAddress(address);
  if (exported() || !data.so_far.num_rollouts) return null;
  return (
    <>
      <TextSearch name={SAID} query={query} onChange={(changes) => go(withQuery(address, changes), "replace")} />
      {query.get(SAID) && <Hits address={withQuery(`${data.address}/rollouts`, { q: query.get(SAID) })} />}
    </>
  );
}

function Hits({ address }: { address: string }) {
  // What a search has found stays as it is, whatever the eval goes on to write.
  const loaded = useData<EvalRolloutsPage>(address, undefined, []);
  return (
    <Ready loaded={loaded}>
      {(first) => (
        <Search address={address} first={first} isOld={loaded.isOld} progressOf={searched}>
          {(hits) => (
            <Table
              caption="Rollouts that say it"
              rows={hits}
              keyOf={(row) => row.address}
              columns={[
                {
                  name: "Rollout",
                  cell: (row) => (
                    <Link to={row.address} class="name">{`${visible(String(row["example_id"] || row["group_id"]))} #${String(row["index"])}`}</Link>
                  ),
                },
                { name: "Excerpt", cell: (row) => <span class="mono excerpt">{visible(String(row["excerpt"] ?? ""))}</span> },
                { name: "Status", cell: (row) => <State state={String(row["status"])} /> },
                { name: "Reward", isNumber: true, cell: (row) => formatCell(row["reward"], "reward") },
              ]}
            />
          )}
        </Search>
      )}
    </Ready>
  );
}

function searched(pages: EvalRolloutsPage[]): Progress {
  const { num_searched, num_rollouts, is_complete } = pages.at(-1)!.search;
  return { done: num_searched, of: num_rollouts, text: is_complete ? "" : ` in ${formatNumber(num_searched)} of ${formatNumber(num_rollouts)}` };
}

function Flips({ data, address }: { data: EvalPage; address: string }) {
  if (data.num_gained === null) return null;
  const flips = rowsOf<Flip>(data.flips.columns as never);
  return (
    <>
      <h2>Examples that flipped</h2>
      <p class="note">
        {data.num_gained} are solved more often than in {titleOf(data, data.against ?? "")}, {data.num_lost} less often; those come first.
      </p>
      {flips.length === 0 && <Empty>No example changed.</Empty>}
      {flips.length > 0 && (
        <LongTable
          name="flips"
          address={address}
          caption="Examples that flipped"
          rows={flips}
          size={20}
          keyOf={(row) => row.example_id}
          columns={[
            { name: "Example", value: (row) => row.example_id, cell: (row) => visible(row.example_id) },
            { name: "Before", isNumber: true, value: (row) => row.before, cell: (row) => <Link to={row.address_before}>{formatNumber(row.before, 3)}</Link> },
            { name: "After", isNumber: true, value: (row) => row.after, cell: (row) => <Link to={row.address_after}>{formatNumber(row.after, 3)}</Link> },
            { name: "Change", isNumber: true, value: (row) => row.change, cell: (row) => `${row.change > 0 ? "+" : ""}${formatNumber(row.change, 3)}` },
          ]}
        />
      )}
    </>
  );
}

function Tasks({ data, address }: { data: EvalPage; address: string }) {
  const tasks = rowsOf<Task>(data.tasks.columns as never);
  if (!tasks.length) return null;
  return (
    <>
      <h2>All examples</h2>
      <LongTable
        name="examples"
        address={address}
        caption="All examples of the eval"
        rows={tasks}
        textOf={(row) => row.example_id}
        searched="example ids"
        keyOf={(row) => row.address}
        columns={[
          { name: "Example", value: (row) => row.example_id, cell: (row) => <Link to={row.address}>{visible(row.example_id)}</Link> },
          { name: "Mean reward", isNumber: true, value: (row) => row.mean, cell: (row) => formatNumber(row.mean, 3) },
          {
            name: "Solved",
            isNumber: true,
            value: (row) => (row.num_rollouts && row.num_solved !== null ? row.num_solved / row.num_rollouts : null),
            cell: (row) => solvedText(row, plannedOf(data)),
          },
          { name: "Failed", isNumber: true, value: (row) => row.num_failed, cell: (row) => formatNumber(row.num_failed) },
        ]}
      />
    </>
  );
}

/** Rollouts that are to be played of each example; null where that is not known. */
const plannedOf = ({ settings }: EvalPage) => (typeof settings["rollouts"] === "number" ? settings["rollouts"] : null);

/** How many rollouts of an example are solved; before that is known, how many are played. */
export function solvedText(row: Pick<Task, "num_solved" | "num_rollouts" | "num_failed">, planned: number | null): string {
  if (row.num_solved !== null) return `${row.num_solved} of ${row.num_rollouts}`;
  const played = row.num_rollouts + row.num_failed;
  return planned === null ? `${played} played` : `${played} of ${planned} played`;
}

function Settings({ settings }: { settings: Record<string, unknown> }) {
  if (!Object.keys(settings).length) return null;
  return (
    <details>
      <summary>What it was started with</summary>
      <pre>{visible(JSON.stringify(settings, null, 2))}</pre>
    </details>
  );
}
