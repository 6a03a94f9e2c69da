import { Filters, OtherFilters } from "../components/Filters.tsx";
import { Histogram } from "../components/Histogram.tsx";
import { Link } from "../components/Link.tsx";
import { Empty, IndexNote, Ready, State } from "../components/States.tsx";
import { Table, type Column } from "../components/Table.tsx";
import { Search, type Hit, type Progress } from "../components/Search.tsx";
import { joined, parseAddress, withQuery } from "../lib/address.ts";
import { rowsOf } from "../lib/columns.ts";
import { useData } from "../lib/data.ts";
import { formatByName, formatCell, formatNumber, plural } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { reasonOf } from "../lib/reasons.ts";
import { exported, go } from "../lib/router.ts";
import type { Distribution, RolloutsPage } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

const PAGE = 50;
const PARTS = ["rollouts", "attempts"];

type Row = Hit;

/** What people look for most. */
const PRESETS: [string, Record<string, string | null>][] = [
  // What a search has found has an order of its own, so that another one ends the search.
  ["newest first", { sort: null, q: null }],
  ["worst first", { sort: "reward", q: null }],
  ["best first", { sort: "-reward", q: null }],
  ["longest first", { sort: "-num_completion_tokens", q: null }],
  ["truncated only", { truncated: "true" }],
  ["failed only", { status: "failed" }],
];

export function Rollouts({ address, query, run }: PageProps) {
  const still = exported() !== undefined;
  // What a search has found stays as it is, whatever the run goes on to write.
  const loaded = useData<RolloutsPage>(address, query.get("q") ? undefined : run, PARTS);
  const change = (changes: Record<string, string | number | null>) =>
    go(withQuery(address, { offset: null, cursor: null, ...changes }));
  const clear = (name: string, value: string) => {
    const { path, query: kept } = parseAddress(address);
    const others = kept.getAll(name).filter((one) => one !== value);
    kept.delete(name);
    for (const one of others) kept.append(name, one);
    kept.delete("offset");
    go(joined(path, kept));
  };
  return (
    <>
      <h1>Rollouts</h1>
      <Ready loaded={loaded}>
        {(data) => (
          <>
            <IndexNote index={data.index} />
            {still && (
              <p class="note">
                This export has {formatNumber(data.num_of_export)} of the {formatNumber(data.num_of_run)} rollouts of the run: of its
                steps the best, the worst, and others. <code>telescope ui</code> on the run folder shows all of them and searches in them,
                and <code>--rollouts</code> writes more into an export.
              </p>
            )}
            <p class="tools">
              {PRESETS.map(([label, asked]) => (
                <Link key={label} to={withQuery(address, { offset: null, cursor: null, ...asked })}>
                  {label}
                </Link>
              ))}
              <Link to={parseAddress(address).path}>without filters</Link>
            </p>
            <Filters query={query} choices={data.choices} onChange={change} isStill={still} />
            <OtherFilters query={query} onClear={clear} />
            {!still && <Shown address={address} data={data} run={run} onChange={change} />}
            <Rows address={address} data={data} isOld={loaded.isOld} onChange={change} />
          </>
        )}
      </Ready>
    </>
  );
}

interface ShownProps {
  address: string;
  data: RolloutsPage;
  run: string;
  onChange: (changes: Record<string, string | number | null>) => void;
}

/** How a value is distributed over all rollouts that the filters leave. */
function Shown({ address, data, run, onChange }: ShownProps) {
  const { query } = parseAddress(address);
  const name = query.get("ui.distribution") ?? "reward";
  const asked = withQuery(address, { distribution: name, q: null, cursor: null, sort: null, offset: null, limit: null });
  const loaded = useData<Distribution>(asked, run, PARTS);
  const names = data.scalar_columns.filter((one) => one.name !== "address");
  const range = (low: number, high: number) => {
    if (name === "reward") onChange({ reward_from: low, reward_to: high });
    else if (name === "step") onChange({ step_from: Math.ceil(low), step_to: Math.floor(high) });
    else go(addWhere(address, name, [`>=${low}`, `<=${high}`]));
  };
  const isTruth = names.some((one) => one.name === name && one.kind === "truth");
  const value = (one: string) => {
    if (name.startsWith("tags/")) go(withQuery(address, { tag: `${name.slice(5)}=${one}`, offset: null }));
    else if (isTruth) go(addWhere(address, name, [`=${Number(one === "true")}`]));
    else onChange({ [name]: one });
  };
  return (
    <details open>
      <summary>Distribution</summary>
      <div class="tools">
        <label>
          Of
          <select value={name} onChange={(event) => go(withQuery(address, { "ui.distribution": event.currentTarget.value }), "replace")}>
            {names.map((one) => (
              <option key={one.name}>{one.name}</option>
            ))}
          </select>
        </label>
        <span class="note">A click on a bar keeps only its rollouts.</span>
      </div>
      <Ready loaded={loaded}>
        {(found) =>
          found.total - found.missing > 0 ? (
            <Histogram data={found} onRange={range} onValue={value} />
          ) : (
            <Empty>No rollout that the filters leave has a value here.</Empty>
          )
        }
      </Ready>
    </details>
  );
}

function addWhere(address: string, name: string, conditions: string[]): string {
  const { path, query } = parseAddress(address);
  const kept = query.getAll("where").filter((one) => !["<", ">", "="].some((sign) => one.startsWith(name + sign)));
  query.delete("where");
  for (const one of [...kept, ...conditions.map((sign) => name + sign)]) query.append("where", one);
  query.delete("offset");
  return joined(path, query);
}

const FIXED: { name: string; label: string; isNumber?: boolean }[] = [
  { name: "step", label: "Step", isNumber: true },
  { name: "environment", label: "Environment" },
  { name: "status", label: "Status" },
  { name: "reward", label: "Reward", isNumber: true },
  { name: "advantage", label: "Advantage", isNumber: true },
  { name: "num_turns", label: "Turns", isNumber: true },
  { name: "num_completion_tokens", label: "Tokens", isNumber: true },
  { name: "stop_reason", label: "Stopped by" },
];

function Rows({ address, data, isOld, onChange }: Omit<ShownProps, "run"> & { isOld: boolean }) {
  const { query } = parseAddress(address);
  const isSearch = Boolean(data.search);
  const named = Object.keys(data.columns).filter((name) => /^(rewards|metrics|tags)\//.test(name));
  const columns: Column<Row>[] = [
    { name: "Rollout", cell: (row) => <Link to={row.address} class="name">{`${visible(String(row["example_id"] || row["group_id"]))} #${String(row["index"])}`}</Link> },
    { name: "Tokens of it", label: <span class="unseen">Tokens</span>, cell: (row) => <Link to={withQuery(row.address, { "ui.view": "tokens" })}>tokens</Link> },
    ...(isSearch ? [{ name: "Excerpt", cell: (row: Row) => <span class="mono excerpt">{visible(String(row["excerpt"] ?? ""))}</span> }] : []),
    ...FIXED.map(({ name, label, isNumber = false }): Column<Row> => ({
      name,
      label,
      isNumber,
      sort: name,
      cell: (row) => (name === "status" ? <State state={String(row["status"])} /> : formatCell(row[name], name)),
    })),
    ...named.map((name): Column<Row> => ({
      name,
      label: name.replace("/", " / "),
      isNumber: !name.startsWith("tags/"),
      ...(name.startsWith("tags/") ? {} : { sort: name }),
      cell: (row) => formatCell(row[name]),
    })),
    { name: "newest_version", label: "Version", isNumber: true, sort: "newest_version", cell: (row) => formatCell(row["newest_version"]) },
    { name: "generate_s", label: "Generated in", isNumber: true, sort: "generate_s", cell: (row) => formatByName("generate_s", row["generate_s"] as number | null) },
    { name: "error", label: "Error", cell: (row) => <Why text={visible(String(row["error"] || reasonOf(String(row["status_reason"] ?? ""))))} /> },
  ];
  const canSort = !isSearch;
  const table = (rows: Row[]) => (
    <Table
      caption="Rollouts"
      columns={columns}
      rows={rows}
      keyOf={(row) => row.address}
      sorted={canSort ? (query.get("sort") ?? "-step") : ""}
      {...(canSort ? { onSort: (sort: string) => onChange({ sort }) } : {})}
    />
  );
  if (isSearch) {
    return (
      <Search address={address} first={data} isOld={isOld} progressOf={(pages) => stepsSearched(pages, query)}>
        {table}
      </Search>
    );
  }
  const rows = rowsOf<Row>(data.columns as never);
  return (
    <>
      {rows.length > 0 && table(rows)}
      {rows.length === 0 && (
        <Empty>
          {data.steps.last === null
            ? "There are no rollouts. Those of a run that goes on appear here by themselves."
            : `No rollout${exported() ? " of this export" : ""} fits these filters. Take one away, or widen it.`}
        </Empty>
      )}
      <Pager address={address} total={data.total ?? rows.length} count={rows.length} />
    </>
  );
}

/** How far a search is, which goes from the newest step to the oldest. */
function stepsSearched(pages: RolloutsPage[], query: URLSearchParams): Progress {
  const [first] = pages;
  const from = Math.max(first?.steps.first ?? 0, Number(query.get("step_from") ?? -Infinity));
  const to = Math.min(first?.steps.last ?? 0, Number(query.get("step_to") ?? Infinity));
  const parts = pages.flatMap(({ search }) => (search?.steps_searched ? [search.steps_searched] : []));
  const [oldest, newest] = [parts.at(-1)?.[0], parts[0]?.[1]];
  if (oldest === undefined || newest === undefined) return { done: 0, of: to - from + 1, text: "" };
  const rest = pages.at(-1)?.search?.is_complete ? "" : ` of ${formatNumber(from)} to ${formatNumber(to)}`;
  return { done: to - oldest + 1, of: to - from + 1, text: ` in steps ${formatNumber(oldest)} to ${formatNumber(newest)}${rest}` };
}

/** Why a rollout failed or was left out; wide enough for a line, so that rows stay low. */
function Why({ text }: { text: string }) {
  return text ? <span class="faint sentence is-wide">{text}</span> : null;
}

function Pager({ address, total, count }: { address: string; total: number; count: number }) {
  const { query } = parseAddress(address);
  const offset = Number(query.get("offset") ?? 0);
  const limit = Number(query.get("limit") ?? PAGE);
  return (
    <nav class="tools" aria-label="Further rollouts">
      <span class="faint number">
        {count ? `${formatNumber(offset + 1)} to ${formatNumber(offset + count)} of ${formatNumber(total)}` : plural(total, "rollout")}
      </span>
      {offset > 0 && <Link to={withQuery(address, { offset: Math.max(0, offset - limit) || null })}>Before</Link>}
      {offset + count < total && <Link to={withQuery(address, { offset: offset + limit })}>After</Link>}
    </nav>
  );
}
