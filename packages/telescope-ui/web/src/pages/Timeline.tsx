import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Facts } from "../components/Facts.tsx";
import { Gantt } from "../components/Gantt.tsx";
import { Link } from "../components/Link.tsx";
import { inSvg } from "../components/painters.ts";
import { Empty, IndexNote, Ready } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { ofRun, withQuery } from "../lib/address.ts";
import { looksOf, type Look } from "../lib/colors.ts";
import { useData } from "../lib/data.ts";
import { formatClock, formatNumber, formatSeconds, formatShare, formatWindow, plural } from "../lib/format.ts";
import { draw, layout, zoomed, type Bar, type View } from "../lib/gantt.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import { fileName, saveText } from "../lib/save.ts";
import type { TimelinePage } from "../lib/machineTypes.ts";

const PARTS = ["timeline", "calls", "events", "servers", "evals", "restarts"];
/** A window is asked for once it has stood still for so long. */
const STILL_MS = 160;
const WIDTH = 1200;

export function Timeline({ address, run }: PageProps) {
  const loaded = useData<TimelinePage>(withQuery(address, { width: WIDTH }), run, PARTS);
  return (
    <>
      <h1>Timeline</h1>
      <Ready loaded={loaded}>
        {(data) =>
          data.extent === null || data.rows.length === 0 ? (
            <Empty>Nothing of this run is on a timeline. The first spans of a run that goes on appear here by themselves.</Empty>
          ) : (
            <Content data={data} address={address} />
          )
        }
      </Ready>
    </>
  );
}

function Content({ data, address }: { data: TimelinePage; address: string }) {
  const names = useMemo(() => namesOf(data), [data]);
  const looks = useMemo(() => looksOf(names), [names]);
  const lookOf = (name: string, kind: string) => looks.get(named(name, kind));
  const query = new URLSearchParams(address.split("?")[1] ?? "");
  const isWhole = !query.has("from") && !query.has("to");
  // An export has one window, of which its page shows what is asked for.
  const end = (name: "from" | "to") => (exported() && query.has(name) ? Number(query.get(name)) : data[name]);
  const asked: View = { from: end("from"), to: end("to") };
  const [view, setView] = useState<View>(asked);
  const mark = query.get("ui.mark") ?? "";
  const [selected, select] = useState<Bar | null>(() => barOf(data, mark));
  const own = useRef("");
  // What the address says, unless this page has just written it there.
  useEffect(() => {
    if (`${query.get("from")} ${query.get("to")}` !== own.current) setView(asked);
  }, [address, isWhole ? data.to : 0]);
  const timer = useRef(0);
  const show = (next: View) => {
    setView(next);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      const [from, to] = [next.from.toFixed(4), next.to.toFixed(4)];
      own.current = `${from} ${to}`;
      go(withQuery(address, { from, to }), "replace");
    }, STILL_MS);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const zoom = (factor: number) => show(zoomed(view, factor, (view.from + view.to) / 2));
  const whole = () => {
    own.current = "";
    clearTimeout(timer.current);
    if (data.extent) setView(data.extent);
    go(withQuery(address, { from: null, to: null, "ui.mark": null }), "replace");
  };
  const save = () => {
    const height = layout(data.rows).height + 12;
    const painter = inSvg(WIDTH, height);
    draw(painter, { page: data, view, width: WIDTH, height, scroll: 0, mark, selected, lookOf });
    saveText(`${fileName(`${data.run.name} timeline`)}.svg`, painter.done(), "image/svg+xml");
  };
  return (
    <>
      <div class="tools">
        <button type="button" onClick={() => zoom(1 / 2)}>Zoom in</button>
        <button type="button" onClick={() => zoom(2)}>Zoom out</button>
        <button type="button" onClick={whole}>Whole run</button>
        <button type="button" onClick={save}>SVG</button>
        {!exported() && (
          <a href={withQuery(`${ofRun(data.run.key)}/timeline/trace.json`, { from: view.from.toFixed(4), to: view.to.toFixed(4) })} download={`${data.run.key}-trace.json`}>
            For Perfetto
          </a>
        )}
        <span class="faint" role="status">
          {formatWindow(view.from, view.to)},{" "}
          {formatSeconds(view.to - view.from)}
        </span>
      </div>
      <IndexNote index={data.index} what="files of stages are summed up" />
      {data.num_spans > data.max_trace_spans && !exported() && (
        <p class="note">
          This window has {formatNumber(data.num_spans)} spans, and a file for Perfetto holds the first{" "}
          {formatNumber(data.max_trace_spans)} of them: zoom in for one that is whole.
        </p>
      )}
      {data.rows.some((row) => row.is_too_wide) && (
        <p class="note">Stages of environments are shown as how many there were at once; zoom in for each of them.</p>
      )}
      <p class="note">
        Ctrl and the wheel, two fingers, or W and S zoom; drag, or A and D, move. Press a bar to see what it is.
      </p>
      {selected && <Chosen bar={selected} data={data} />}
      <Gantt
        page={data}
        view={view}
        mark={mark}
        selected={selected}
        lookOf={lookOf}
        label={`What ${plural(data.rows.length, "part")} of the run did; the table below says the same`}
        onView={show}
        onSelect={select}
      />
      <ul class="legend" aria-label="Colors">
        {names.map((name) => (
          <li key={name}>
            <Swatch look={looks.get(name)} /> {name}
          </li>
        ))}
      </ul>
      <WhereTimeWent data={data} looks={looks} />
      <Longest data={data} view={view} />
    </>
  );
}

/** The bar that a link leads to: a call of the rollout, or else a stage of it. */
function barOf(data: TimelinePage, address: string): Bar | null {
  if (!address) return null;
  const found = data.rows.flatMap((row) => {
    const at = row.bars.columns.address.indexOf(address);
    return at < 0 ? [] : [{ row, at }];
  });
  return found.find((bar) => bar.row.kind === "server") ?? found[0] ?? null;
}

/** What a bar is called in the legend: every eval and every checkpoint has a name of its own. */
function named(name: string, kind: string): string {
  if (kind === "evals") return "evals";
  return name.startsWith("write ") ? "write checkpoint" : name;
}

/** Names of the legend, the most frequent first. */
function namesOf(data: TimelinePage): string[] {
  const counts = new Map<string, number>();
  for (const row of data.rows) {
    for (const name of [...row.bars.columns.name, ...(row.density?.name ?? [])]) {
      const shown = named(name, row.kind);
      if (shown) counts.set(shown, (counts.get(shown) ?? 0) + 1);
    }
  }
  for (const { name } of data.time) if (name && !counts.has(name)) counts.set(name, 0);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name);
}

const classOf = (look: Look | undefined): string =>
  look ? `series-${look.color} pattern-${look.pattern}` : "nothing";

function Swatch({ look }: { look: Look | undefined }) {
  return <i class={`swatch ${classOf(look)}`} />;
}

/** The legend, which is a sum too: how long the driver was at each of these in the window. */
function WhereTimeWent({ data, looks }: { data: TimelinePage; looks: Map<string, Look> }) {
  const whole = data.to - data.from || 1;
  const parts = data.time.filter((one) => one.seconds > 0);
  if (!parts.length) return null;
  return (
    <section aria-label="Where the time went">
      <h2>Where the time of {exported() ? "the run" : "this window"} went</h2>
      <div class="stacked" aria-hidden="true">
        {parts.map(({ name, seconds }) => (
          <i
            key={name}
            class={classOf(looks.get(name))}
            style={{ width: `${(100 * seconds) / whole}%` }}
          />
        ))}
      </div>
      <ul class="legend">
        {parts.map(({ name, seconds }) => (
          <li key={name}>
            <Swatch look={looks.get(name)} /> {name || "nothing recorded"} {formatShare(seconds / whole)}{" "}
            <span class="faint">({formatSeconds(seconds)})</span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function Chosen({ bar, data }: { bar: Bar; data: TimelinePage }) {
  const columns = bar.row.bars.columns;
  const at = bar.at;
  const step = columns.step[at] ?? null;
  const version = columns.version[at] ?? null;
  const place = columns.address[at] ?? "";
  const key = data.run.key;
  return (
    <section class="card" aria-label="The bar that was chosen" role="status">
      <h2>{columns.name[at]}</h2>
      <Facts
        facts={[
          ["Of", bar.row.label],
          ["Began", formatClock(columns.start_s[at] ?? 0, 0.001)],
          ["Took", formatSeconds(columns.duration_s[at])],
          ["Step", formatNumber(step)],
          ["Version", formatNumber(version)],
          ["Note", columns.note[at] || "-"],
        ]}
      />
      <p class="tools">
        {place && <Link to={place}>{place.includes("/evals/") ? "Open the eval" : "Open the rollout"}</Link>}
        {step !== null && step > 0 && (
          <Link to={withQuery(ofRun(key, "rollouts"), { step_from: step, step_to: step })}>Rollouts of step {step}</Link>
        )}
        {bar.row.kind === "server" && <Link to={withQuery(ofRun(key, "infra"), { source: bar.row.source })}>Meters of the server</Link>}
      </p>
    </section>
  );
}

/** The longest bars of the window as a table: for readers of screens, and for keys. */
function Longest({ data, view }: { data: TimelinePage; view: View }) {
  const rows = useMemo(() => {
    const found: { bar: Bar; start: number; duration: number }[] = [];
    for (const row of data.rows) {
      row.bars.columns.start_s.forEach((start, at) => {
        const duration = row.bars.columns.duration_s[at] ?? 0;
        if (start < view.to && start + duration > view.from) found.push({ bar: { row, at }, start, duration });
      });
    }
    return found.sort((a, b) => b.duration - a.duration).slice(0, 40);
  }, [data, view.from, view.to]);
  return (
    <details>
      <summary>The longest of this window as a table</summary>
      <Table
        caption="The longest bars of the window"
        rows={rows}
        keyOf={({ bar }) => `${bar.row.source} ${bar.at}`}
        columns={[
          { name: "Of", cell: ({ bar }) => bar.row.label },
          {
            name: "What",
            cell: ({ bar }) => {
              const place = bar.row.bars.columns.address[bar.at];
              const name = bar.row.bars.columns.name[bar.at] ?? "";
              return place ? <Link to={place}>{name}</Link> : name;
            },
          },
          { name: "Began", isNumber: true, cell: ({ start }) => formatClock(start, 0.001) },
          { name: "Took", isNumber: true, cell: ({ duration }) => formatSeconds(duration) },
          { name: "Step", isNumber: true, cell: ({ bar }) => formatNumber(bar.row.bars.columns.step[bar.at]) },
          { name: "Note", cell: ({ bar }) => bar.row.bars.columns.note[bar.at] ?? "" },
        ]}
      />
    </details>
  );
}
