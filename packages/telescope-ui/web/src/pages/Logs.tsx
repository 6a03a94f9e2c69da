import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Empty, Loading, Trouble } from "../components/States.tsx";
import { dataAddress, withQuery } from "../lib/address.ts";
import { rowsOf } from "../lib/columns.ts";
import { DataError, load, useData } from "../lib/data.ts";
import { folded, processOf, type LogLine } from "../lib/fold.ts";
import { formatBytes, formatClock, formatDate, formatNumber } from "../lib/format.ts";
import { useLive } from "../lib/live.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { LogsPage } from "../lib/machineTypes.ts";
import { visible } from "../lib/visible.ts";

interface Held {
  lines: LogLine[];
  older: string | null;
  newer: string;
  isCut: boolean;
  reached_s: number | null;
}

/** So many lines are looked for by the page itself; more come by a button. */
const WANTED = 500;
/** Lines that the page keeps; the oldest fall away while it follows a run. */
const MAX_LINES = 10_000;
const LEVELS = ["debug", "info", "warning", "error"];

const linesOf = (page: LogsPage) => rowsOf<LogLine>(page.lines.columns as never);

export function Logs({ address, query, run }: PageProps) {
  const first = useData<LogsPage>(address);
  // Listened for before the first lines are asked for, so that none that come meanwhile are missed.
  const written = useLive(run, ["logs"]);
  const change = (changes: Record<string, string | null>) => go(withQuery(address, changes), "replace");
  return (
    <>
      <h1>Logs</h1>
      <form class="filters" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
        <Search value={query.get("q") ?? ""} onChange={(q) => change({ q: q || null })} />
        <Select name="level" label="Least level" all="all" values={LEVELS} query={query} onChange={change} />
        <Select name="component" label="Component" all="all" values={[...new Set((first.data?.components ?? []).map((one) => one.name))]} query={query} onChange={change} />
        <Select name="source" label="Source" all="all" values={first.data?.sources ?? []} query={query} onChange={change} />
        <Select name="life" label="Start" all="all" values={(first.data?.lives ?? []).map(String)} query={query} onChange={change} />
      </form>
      {first.error && <Trouble message={first.error.message} />}
      {first.isOld && <Loading />}
      {first.data && !first.isOld && (
        <Lines
          key={dataAddress(address)}
          address={address}
          first={first.data}
          written={written}
          folds={query.get("ui.fold") !== "no"}
          onFold={(folds) => change({ "ui.fold": folds ? null : "no" })}
        />
      )}
      {first.data && <Files data={first.data} />}
    </>
  );
}

interface LinesProps {
  address: string;
  first: LogsPage;
  /** Grows whenever a log does. */
  written: number;
  folds: boolean;
  onFold: (folds: boolean) => void;
}

function Lines({ address, first, written, folds, onFold }: LinesProps) {
  const [held, hold] = useState<Held>(() => ({
    lines: linesOf(first),
    older: first.older,
    newer: first.newer,
    isCut: first.is_cut,
    reached_s: first.reached_s,
  }));
  const [isStopped, stop] = useState(false);
  const [trouble, setTrouble] = useState("");
  const [follows, setFollows] = useState(true);
  const box = useRef<HTMLDivElement>(null);
  /** The change whose lines are all there. */
  const [told, tell] = useState(0);
  const ask = (cursor: string, direction: "older" | "newer", until?: number) =>
    load<LogsPage>(withQuery(address, { cursor, direction })).then(
      (page) => {
        setTrouble("");
        // Who presses a button twice has asked for the same lines twice.
        hold((before) => (before[direction] === cursor ? merged(before, page, direction) : before));
        if (until !== undefined && (!page.is_cut || page.newer === cursor)) tell(until);
      },
      (error: unknown) => {
        setTrouble(error instanceof DataError ? error.message : String(error));
        if (until !== undefined) tell(until);
      },
    );
  const isBehind = follows && told !== written;
  useEffect(() => {
    if (isBehind) void ask(held.newer, "newer", written);
  }, [isBehind, told, held.newer]);
  const searches = !exported() && !isStopped && held.isCut && held.older !== null && held.lines.length < WANTED && !trouble;
  useEffect(() => {
    if (searches) void ask(held.older ?? "", "older");
  }, [searches, held.older]);
  const shown = useMemo(
    () => (folds ? folded(held.lines) : held.lines.map((line) => ({ line, count: 1, last_s: line.time_s }))),
    [held.lines, folds],
  );
  useLayoutEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [held.lines, follows]);
  return (
    <>
      {trouble && <Trouble message={trouble} />}
      <div class="tools">
        {searches && (
          <span role="status" class="faint">
            Searching; back to {formatDate(held.reached_s)} so far.{" "}
            <button type="button" onClick={() => stop(true)}>
              Stop
            </button>
          </span>
        )}
        {held.older && !searches && !exported() && (
          <button type="button" onClick={() => { setFollows(false); stop(false); void ask(held.older ?? "", "older"); }}>
            Older lines
          </button>
        )}
        <label class="check">
          <input type="checkbox" checked={follows} onChange={(event) => setFollows(event.currentTarget.checked)} />
          follow the newest
        </label>
        <label class="check">
          <input type="checkbox" checked={folds} onChange={(event) => onFold(event.currentTarget.checked)} />
          fold repeated lines
        </label>
      </div>
      {held.lines.length === 0 && !searches && <Empty>No line fits. Logs appear here as the run writes them.</Empty>}
      <div class="logs" ref={box} tabIndex={0} role="log" aria-label="Lines of the logs, the newest at the end">
        {shown.map(({ line, count, last_s }, at) => (
          <div key={at} class={`line level-${line.level}`}>
            <pre class="faint" title={formatDate(line.time_s)}>{line.time_s === null ? "" : formatClock(line.time_s, 0.001)}</pre>
            <pre>{line.level}</pre>
            <pre class="faint">
              {visible(processOf(line))}
              {(line.life ?? 1) > 1 && ` (start ${line.life})`}
            </pre>
            <pre>
              {count > 1 && (
                <b class="count" title={`the last time at ${formatDate(last_s)}`}>
                  {formatNumber(count)} times{" "}
                </b>
              )}
              {visible(line.message)}
            </pre>
          </div>
        ))}
      </div>
    </>
  );
}

function merged(before: Held, page: LogsPage, direction: "older" | "newer"): Held {
  const lines = linesOf(page);
  if (direction === "older") return { ...before, lines: [...lines, ...before.lines], older: page.older, isCut: page.is_cut, reached_s: page.reached_s };
  return { ...before, lines: [...before.lines, ...lines].slice(-MAX_LINES), newer: page.newer };
}

function Files({ data }: { data: LogsPage }) {
  if (!data.components.length) return null;
  return (
    <p class="note">
      Files in <code>logs/</code>: {data.components.map((one) => `${one.file} (${formatBytes(one.bytes)})`).join(", ")}
    </p>
  );
}

function Search({ value, onChange }: { value: string; onChange: (text: string) => void }) {
  const [draft, setDraft] = useState(value);
  return (
    <label>
      Text
      <input
        type="search"
        value={draft}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onChange={() => draft !== value && onChange(draft)}
      />
    </label>
  );
}

interface SelectProps {
  name: string;
  label: string;
  all: string;
  values: string[];
  query: URLSearchParams;
  onChange: (changes: Record<string, string | null>) => void;
}

function Select({ name, label, all, values, query, onChange }: SelectProps) {
  const value = query.get(name) ?? "";
  const shown = value && !values.includes(value) ? [value, ...values] : values;
  return (
    <label>
      {label}
      <select value={value} onChange={(event) => onChange({ [name]: event.currentTarget.value || null })}>
        <option value="">{all}</option>
        {shown.map((one) => (
          <option key={one}>{one}</option>
        ))}
      </select>
    </label>
  );
}

