import { Link } from "../components/Link.tsx";
import { LongTable, type LongColumn } from "../components/LongTable.tsx";
import { Spark } from "../components/Spark.tsx";
import { Empty, IndexNote, Ready, State } from "../components/States.tsx";
import { dataAddress, ofRun, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatAgo, formatIso, formatNumber, nameOfRun, plural } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { EvalEntry, RunEntry, RunsPage, Seeds } from "../lib/types.ts";

const MAX_COMPARED = 12;

/** A run, or runs that differ in their seed alone. */
interface Line {
  run: RunEntry;
  seeds: Seeds | null;
  isInside: boolean;
}

export function Runs({ address, query }: PageProps) {
  const loaded = useData<RunsPage>(dataAddress(address), "", ["runs"]);
  return (
    <Ready loaded={loaded}>
      {(data) => {
        const { runs, evals, folders, left_out, index } = data;
        return (
          <>
            <div class="head">
              <h1>Runs</h1>
              <span class="faint">
                {plural(runs.length, "run")}
                {evals.length > 0 && ` and ${plural(evals.length, "eval")}`} in {folders.join(", ")}
              </span>
            </div>
            <IndexNote index={index} what="runs and evals, the newest first" />
            {left_out.length > 0 && (
              <p class="note">
                Not followed, as they lead out of the folders: {left_out.join(", ")}. <code>telescope ui TARGET</code> shows
                what is there.
              </p>
            )}
            {runs.length + evals.length === 0 && (
              <Empty>
                There are no runs in {folders.join(", ")} yet. <code>telescope train CONFIG</code> writes one to{" "}
                <code>runs/</code>; it appears here by itself.
              </Empty>
            )}
            {runs.length > 0 && <Listed data={data} address={address} query={query} />}
            {evals.length > 0 && <StandaloneEvals evals={evals} address={address} />}
          </>
        );
      }}
    </Ready>
  );
}

const FILTERS: [string, string, (run: RunEntry) => (string | null)[]][] = [
  ["state", "State", (run) => [run.state]],
  ["model", "Model", (run) => [run.model]],
  ["environment", "Environment", (run) => run.environments ?? []],
];

function Listed({ data, address, query }: { data: RunsPage; address: string; query: URLSearchParams }) {
  const { runs, seeds } = data;
  const text = query.get("ui.text") ?? "";
  const chosen = query.getAll("ui.chosen");
  const open = query.getAll("ui.open");
  const change = (changes: Record<string, string>, how: "push" | "replace" = "push") =>
    go(withQuery(address, { "ui.page": null, ...changes }), how);
  const toggled = (name: string, values: string[], one: string) =>
    go(withQuery(address, { [name]: values.includes(one) ? values.filter((value) => value !== one) : [...values, one] }), "replace");
  const asked = FILTERS.filter(([name]) => query.has(`ui.${name}`));
  const shown = runs.filter(
    (run) =>
      haystack(run).includes(text.toLowerCase()) &&
      asked.every(([name, , values]) => values(run).includes(query.get(`ui.${name}`))),
  );
  const isNarrowed = text !== "" || asked.length > 0;
  const compared = exported() ? runs.map((run) => run.key) : chosen;
  return (
    <>
      <div class="tools">
        <label>
          Search
          <input type="search" value={text} onInput={(event) => change({ "ui.text": event.currentTarget.value }, "replace")} />
        </label>
        {FILTERS.map(([name, label, values]) => {
          const choices = [...new Set(runs.flatMap(values))].filter((one): one is string => Boolean(one)).sort();
          if (choices.length < 2 && !query.has(`ui.${name}`)) return null;
          return (
            <label key={name}>
              {label}
              <select value={query.get(`ui.${name}`) ?? ""} onChange={(event) => change({ [`ui.${name}`]: event.currentTarget.value })}>
                <option value="">all</option>
                {choices.map((one) => (
                  <option key={one}>{one}</option>
                ))}
              </select>
            </label>
          );
        })}
        <button
          type="button"
          disabled={compared.length < 2 || compared.length > MAX_COMPARED}
          onClick={() => go(withQuery("/compare", { run: [...compared].sort() }))}
        >
          {exported() ? "Compare all" : `Compare ${chosen.length ? plural(chosen.length, "run") : "chosen runs"}`}
        </button>
        {chosen.length > MAX_COMPARED && <span class="note">At most {MAX_COMPARED} can be compared.</span>}
        {isNarrowed && <span class="note">{plural(shown.length, "run")} of {formatNumber(runs.length)}</span>}
      </div>
      {shown.length === 0 && <Empty>No run fits this search.</Empty>}
      {shown.length > 0 && (
        <LongTable
          name=""
          address={address}
          caption="Runs, newest change first"
          columns={columns(
            open,
            (name) => toggled("ui.open", open, name),
            chosen,
            (key) => toggled("ui.chosen", chosen, key),
          )}
          rows={isNarrowed ? shown.map(alone) : lines(runs, seeds)}
          below={({ seeds: group }) =>
            group && open.includes(nameOf(group))
              ? runs.filter((run) => group.runs.includes(run.key)).map((run) => ({ run, seeds: null, isInside: true }))
              : []
          }
          keyOf={(line) => (line.seeds ? `seeds ${nameOf(line.seeds)}` : line.run.key)}
          rowClass={(line) => (line.isInside ? "is-inside" : undefined)}
        />
      )}
    </>
  );
}

const alone = (run: RunEntry): Line => ({ run, seeds: null, isInside: false });
const nameOf = (seeds: Seeds) => `${seeds.name} ${seeds.runs[0]}`;

/** Runs of several seeds are one line, which stands where the newest of them would. */
function lines(runs: RunEntry[], seeds: Seeds[]): Line[] {
  const byKey = new Map(seeds.flatMap((one) => one.runs.map((key): [string, Seeds] => [key, one])));
  const done = new Set<Seeds>();
  return runs.flatMap((run) => {
    const group = byKey.get(run.key);
    if (!group) return [alone(run)];
    if (done.has(group)) return [];
    done.add(group);
    return [{ run, seeds: group, isInside: false }];
  });
}

function haystack(run: RunEntry): string {
  return [run.name, run.key, run.state, run.model, run.algorithm, ...(run.environments ?? [])].join(" ").toLowerCase();
}

function columns(
  open: string[],
  toggle: (name: string) => void,
  chosen: string[],
  choose: (key: string) => void,
): LongColumn<Line>[] {
  const found: LongColumn<Line>[] = [
    {
      name: "Run",
      value: ({ run, seeds }) => (seeds ? seeds.name : run.name),
      cell: ({ run, seeds }) =>
        seeds ? (
          <button type="button" class="plain" aria-expanded={open.includes(nameOf(seeds))} onClick={() => toggle(nameOf(seeds))}>
            {open.includes(nameOf(seeds)) ? "\u25be " : "\u25b8 "}
            {seeds.name} <span class="faint">({plural(seeds.runs.length, "run")})</span>
          </button>
        ) : (
          <Link to={ofRun(run.key)} class="name" title={run.folder}>
            {nameOfRun(run)}
          </Link>
        ),
    },
    { name: "State", value: ({ run }) => run.state, cell: ({ run, seeds }) => (seeds ? null : <State state={run.state} />) },
    { name: "Step", isNumber: true, value: ({ run }) => run.step, cell: ({ run, seeds }) => (seeds ? null : progress(run)) },
    {
      name: "Reward",
      label: <span title="Mean of the newest 10 steps; over several seeds, the mean and the standard deviation of those.">Reward, last 10</span>,
      isNumber: true,
      value: ({ run, seeds }) => (seeds ? seeds.recent_reward.mean : run.recent_reward),
      cell: ({ run, seeds }) => (seeds ? <Spread seeds={seeds} /> : formatNumber(run.recent_reward)),
    },
    { name: "Curve", cell: ({ run, seeds }) => !seeds && run.curve && <Spark xs={run.curve.steps} ys={run.curve.values} /> },
    {
      name: "Environments",
      value: ({ run }) => (run.environments ?? []).join(", "),
      cell: ({ run }) => <Clipped text={(run.environments ?? []).join(", ")} />,
    },
    { name: "Model", value: ({ run }) => run.model, cell: ({ run }) => <Clipped text={run.model ?? ""} /> },
    { name: "Algorithm", value: ({ run }) => run.algorithm, cell: ({ run }) => run.algorithm ?? "-" },
    { name: "Started", value: ({ run }) => run.started_at, cell: ({ run }) => <span class="number">{formatIso(run.started_at)}</span> },
    { name: "Last change", value: ({ run }) => run.changed_s, cell: ({ run }) => <span class="number">{formatAgo(run.changed_s)}</span> },
    { name: "Why it ended", cell: ({ run, seeds }) => !seeds && <Clipped text={run.error ?? run.reason ?? ""} /> },
  ];
  if (exported()) return found;
  const ticks: LongColumn<Line> = {
    name: "Compare",
    label: <span class="unseen">Compare</span>,
    cell: ({ run, seeds }) =>
      !seeds && (
        <input
          type="checkbox"
          checked={chosen.includes(run.key)}
          onChange={() => choose(run.key)}
          aria-label={`compare ${nameOfRun(run)}`}
        />
      ),
  };
  return [ticks, ...found];
}

function Spread({ seeds }: { seeds: Seeds }) {
  const { mean, deviation, minimum, maximum } = seeds.recent_reward;
  const range = `${formatNumber(minimum, 3)} to ${formatNumber(maximum, 3)}`;
  return (
    <span title={range}>
      {formatNumber(mean, 3)}
      {deviation !== null && ` \u00b1 ${formatNumber(deviation, 2)}`}
    </span>
  );
}

/** Text on one line; all of it is told when it is pointed at. */
function Clipped({ text }: { text: string }) {
  return text ? (
    <span class="clipped" title={text}>
      {text}
    </span>
  ) : (
    <>-</>
  );
}

function progress(run: RunEntry): string {
  if (run.step === null) return "-";
  return run.number_of_steps ? `${formatNumber(run.step)} / ${formatNumber(run.number_of_steps)}` : formatNumber(run.step);
}

function StandaloneEvals({ evals, address }: { evals: EvalEntry[]; address: string }) {
  return (
    <>
      <h2>Evals without a run</h2>
      <LongTable
        name="evals"
        address={address}
        caption="Evals without a run, newest change first"
        rows={evals}
        keyOf={(one) => one.key}
        columns={[
          {
            name: "Eval",
            value: (one) => one.name,
            cell: (one) => (
              <Link to={`/evals/${encodeURIComponent(one.key)}`} class="name">
                {nameOfRun(one)}
              </Link>
            ),
          },
          { name: "State", value: (one) => one.state, cell: (one) => (one.state ? <State state={one.state} /> : "-") },
          { name: "Environment", value: (one) => one.environment, cell: (one) => <Clipped text={one.environment ?? ""} /> },
          { name: "Model", value: (one) => one.model, cell: (one) => <Clipped text={one.model ?? ""} /> },
          { name: "Measure", value: (one) => one.measure, cell: (one) => one.measure ?? "-" },
          { name: "Mean", isNumber: true, value: (one) => one.mean, cell: (one) => formatNumber(one.mean, 3) },
          {
            name: "95% interval",
            isNumber: true,
            cell: (one) => (one.low === null ? "-" : `${formatNumber(one.low, 3)} to ${formatNumber(one.high, 3)}`),
          },
          { name: "Examples", isNumber: true, value: (one) => one.num_tasks, cell: (one) => formatNumber(one.num_tasks) },
          {
            name: "Rollouts",
            isNumber: true,
            value: (one) => one.num_scored,
            cell: (one) =>
              one.num_rollouts === null ? formatNumber(one.num_scored) : `${formatNumber(one.num_scored)} / ${formatNumber(one.num_rollouts)}`,
          },
          { name: "Failed", isNumber: true, value: (one) => one.num_failed, cell: (one) => formatNumber(one.num_failed) },
          { name: "Started", value: (one) => one.started_at, cell: (one) => <span class="number">{formatIso(one.started_at)}</span> },
          { name: "Why it ended", cell: (one) => <Clipped text={one.error ?? one.reason ?? ""} /> },
        ]}
      />
    </>
  );
}
