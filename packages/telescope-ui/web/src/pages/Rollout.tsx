import { useMemo } from "preact/hooks";
import { Conversation, RawSwitch, Tools } from "../components/Conversation.tsx";
import { Facts } from "../components/Facts.tsx";
import { Link } from "../components/Link.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { Tokens } from "../components/Tokens.tsx";
import { dataAddress, ofRun, sideOf, withQuery } from "../lib/address.ts";
import { rowsOf, type Cell } from "../lib/columns.ts";
import { isThere, useData } from "../lib/data.ts";
import { formatCell, formatClock, formatNumber, formatSeconds, plural } from "../lib/format.ts";
import { momentOf } from "../lib/moment.ts";
import { finishOf, reasonOf, stopOf } from "../lib/reasons.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go, href } from "../lib/router.ts";
import { turnsOf, type Turn } from "../lib/turns.ts";
import type { RolloutPage, RolloutRow } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

const VIEWS = ["conversation", "tokens", "calls", "record"] as const;
type View = (typeof VIEWS)[number];

export function Rollout({ address, query, run }: PageProps) {
  const asked = query.get("ui.view") as View;
  const view = VIEWS.includes(asked) ? asked : "conversation";
  // An export has one page of a rollout, with its tokens.
  const tokens = view === "tokens" || exported() ? null : "false";
  const loaded = useData<RolloutPage>(dataAddress(withQuery(address, { tokens })), run, []);
  const isRaw = query.get("ui.raw") === "yes";
  const show = (one: View) => go(withQuery(address, { "ui.view": one === "conversation" ? null : one }), "replace");
  return (
    <Ready loaded={loaded}>
      {(data) => (
        <>
          <Head data={data} view={view} />
          <Outcome row={data.row} />
          <div class="tools" role="group" aria-label="What is shown">
            {VIEWS.map((one) => (
              <button type="button" key={one} aria-pressed={one === view} onClick={() => show(one)}>
                {one === "calls" ? "calls and moments" : one}
              </button>
            ))}
            {view === "conversation" && <RawSwitch address={address} isRaw={isRaw} />}
          </div>
          <div class="split with-aside">
            <div>
              {view === "conversation" && <Talk data={data} isRaw={isRaw} />}
              {view === "tokens" &&
                (loaded.isOld ? (
                  <Empty>Loading...</Empty>
                ) : data.tokens ? (
                  <Tokens
                    tokens={data.tokens}
                    by={query.get("ui.by") ?? ""}
                    onBy={(by) => go(withQuery(address, { "ui.by": by }), "replace")}
                    fits={query.get("ui.scale") === "own"}
                    onFits={(fits) => go(withQuery(address, { "ui.scale": fits ? "own" : null }), "replace")}
                  />
                ) : (
                  <Empty>No tokens are recorded for this rollout.</Empty>
                ))}
              {view === "calls" && <Calls data={data} />}
              {view === "record" && <pre>{visible(JSON.stringify(data.row, null, 2))}</pre>}
            </div>
            <Aside data={data} />
          </div>
        </>
      )}
    </Ready>
  );
}

function Head({ data, view }: { data: RolloutPage; view: View }) {
  const { row, addresses, run } = data;
  const kept = (to: string) => withQuery(to, { "ui.view": view === "conversation" ? null : view });
  return (
    <>
      <p class="crumbs">
        {row.environment} /{" "}
        {addresses.example ? <Link to={addresses.example}>{visible(row.example_id)}</Link> : visible(row.example_id)} /{" "}
        {addresses.group ? <Link to={addresses.group}>group {row.group_id}</Link> : `group ${row.group_id}`}
      </p>
      <div class="head">
        <h1>
          Rollout {row.index}
          {row.attempt > 1 && `, attempt ${row.attempt}`}
          {row.step !== null && !addresses.eval && ` of step ${formatNumber(row.step)}`}
        </h1>
        <State state={row.status} />
        {addresses.previous && isThere(addresses.previous) && (
          <a data-key="k" href={href(kept(addresses.previous))}>
            previous
          </a>
        )}
        {addresses.next && isThere(addresses.next) && (
          <a data-key="j" href={href(kept(addresses.next))}>
            next
          </a>
        )}
        {addresses.timeline && !exported() && (
          <Link to={withQuery(addresses.timeline, { ...momentIn(data), "ui.mark": markOf(data) })}>on the timeline</Link>
        )}
        {addresses.eval && <Link to={addresses.eval}>its eval</Link>}
        {row.step !== null && !addresses.eval && (
          <Link to={withQuery(ofRun(run.key, "rollouts"), { step_from: row.step, step_to: row.step })}>its step</Link>
        )}
      </div>
    </>
  );
}

/** Parameters of the timeline; none, and so those of its address, without calls. */
function momentIn({ calls }: RolloutPage): Record<string, string> {
  const { time_s = [], duration_s = [] } = calls.columns;
  const found = momentOf(time_s.map(Number), duration_s.map(Number));
  return found ? { from: found.from.toFixed(4), to: found.to.toFixed(4) } : {};
}

function Outcome({ row }: { row: RolloutRow }) {
  return (
    <>
      <Facts
        facts={[
          ["Reward", <b key="reward">{formatNumber(row.reward)}</b>],
          ["Advantage", formatNumber(row.advantage)],
          ["Stopped by", row.stop_reason ? stopOf(row.stop_reason) : "-"],
          ["Turns", formatNumber(row.num_turns)],
          ["Prompt tokens", formatNumber(row.num_prompt_tokens)],
          ["Completion tokens", formatNumber(row.num_completion_tokens)],
          ["Weights", versions(row)],
          ["Generated in", formatSeconds(row.generate_s)],
          ["Scored in", formatSeconds(row.score_s)],
          ["Truncated", formatCell(row.is_truncated)],
        ]}
      />
      {row.error && <p class="trouble">{visible(row.error)}</p>}
      {!row.error && row.status_reason && <p class="note lines">Why it is {row.status}: {visible(reasonOf(row.status_reason))}</p>}
    </>
  );
}

function versions({ oldest_version, newest_version }: RolloutRow): string {
  if (oldest_version === null || oldest_version < 0) return "-";
  if (oldest_version === newest_version) return `version ${oldest_version}`;
  return `versions ${oldest_version} to ${newest_version}`;
}

function Talk({ data, isRaw }: { data: RolloutPage; isRaw: boolean }) {
  const turns = useMemo(() => turnsOf(data), [data]);
  if (!data.messages.length && !data.conversations.length) return <Empty>No messages are recorded.</Empty>;
  return (
    <>
      <Tools tools={data.tools} />
      <Conversation messages={data.messages} isRaw={isRaw} below={(at) => <TurnFacts turn={turns.get(at)} />} />
      {["context_length", "max_turns", "timeout"].includes(data.row.stop_reason) && (
        <p class="cut">It ends here by {stopOf(data.row.stop_reason)}.</p>
      )}
      {data.conversations.length > 0 && <h2>{plural(data.conversations.length, "conversation")} beside it</h2>}
      {data.conversations.map((messages, at) => (
        <details key={at}>
          <summary>
            Conversation {at + 1}, {plural(messages.length, "message")}
          </summary>
          <Conversation messages={messages} isRaw={isRaw} />
        </details>
      ))}
    </>
  );
}

/** Below a message of the model: its turn, and a mark where the turn was cut. */
function TurnFacts({ turn }: { turn: Turn | undefined }) {
  if (!turn) return null;
  const facts = [
    `turn ${turn.number}`,
    ...(turn.numTokens === null ? [] : [plural(turn.numTokens, "token")]),
    ...(turn.duration_s === null ? [] : [formatSeconds(turn.duration_s)]),
    ...(turn.numTokens && turn.duration_s ? [`${formatNumber(turn.numTokens / turn.duration_s, 3)} tokens/s`] : []),
    ...(turn.server ? [turn.server] : []),
  ];
  return (
    <>
      {turn.finish === "length" && <p class="cut">Cut here: the turn reached its limit of tokens (max_tokens).</p>}
      <p class="turn-facts">
        {visible(facts.join(" \u00b7 "))}
        {turn.finish !== "length" && ` \u00b7 ${visible(finishOf(turn.finish))}`}
      </p>
    </>
  );
}

function Calls({ data }: { data: RolloutPage }) {
  const calls = rowsOf<Record<string, Cell>>(data.calls.columns);
  const events = rowsOf<Record<string, Cell>>(data.events.columns);
  if (!calls.length && !events.length) return <Empty>Neither calls nor events are recorded for this rollout.</Empty>;
  const seconds = ["duration_s", "queue_s", "first_token_s", "prefill_s", "decode_s"];
  const counts = ["num_prompt_tokens", "num_cached_tokens", "num_completion_tokens"];
  return (
    <>
      <h2>Calls of the model</h2>
      <Table
        caption="Calls of the model"
        rows={calls}
        keyOf={(_, at) => at}
        columns={[
          { name: "Call", isNumber: true, cell: (row) => formatCell(row["call"]) },
          { name: "Time", cell: (row) => clock(row["time_s"]) },
          { name: "Server", cell: (row) => formatCell(row["server"]) },
          { name: "Version", isNumber: true, cell: (row) => formatCell(row["version"]) },
          ...seconds.map((name) => ({
            name: titled(name.replace(/_s$/, "").replace("_", " ")),
            isNumber: true,
            cell: (row: Record<string, Cell>) => formatSeconds(row[name] as number | null),
          })),
          ...counts.map((name) => ({
            name: titled(`${name.replace(/^num_|_tokens$/g, "")} tokens`),
            isNumber: true,
            cell: (row: Record<string, Cell>) => formatCell(row[name]),
          })),
          { name: "Error", cell: (row) => formatCell(row["error"]) },
        ]}
      />
      {events.length > 0 && <h2>Its life</h2>}
      {events.length > 0 && (
        <Table
          caption="Stages of the rollout"
          rows={events}
          keyOf={(_, at) => at}
          columns={[
            { name: "Time", cell: (row) => clock(row["time_s"]) },
            ...["stage", "call", "server", "version", "reason"].map((name) => ({
              name: titled(name),
              // There is no call 0: such a stage has none.
              cell: (row: Record<string, Cell>) =>
                name === "reason" ? formatCell(reasonOf(String(row[name] ?? ""))) : formatCell(name === "call" ? row[name] || null : row[name]),
            })),
          ]}
        />
      )}
    </>
  );
}

const titled = (name: string) => name.charAt(0).toUpperCase() + name.slice(1);

const clock = (value: Cell | undefined) => (
  <span class="number">{typeof value === "number" ? formatClock(value, 0.001) : "-"}</span>
);

function Aside({ data }: { data: RolloutPage }) {
  const { row } = data;
  const answers = Object.entries(row.golden_answers ?? {});
  return (
    <aside aria-label="Scores and siblings">
      {data.reward_parts.length > 0 ? <Parts data={data} /> : <Numbers title="Rewards" values={row.rewards} />}
      <Numbers title="Metrics" values={row.metrics} />
      {answers.length > 0 && <h2>Gold answer</h2>}
      {answers.map(([name, value]) => (
        <p key={name}>
          <span class="faint">{name}: </span>
          <code class="lines">{visible(formatCell(value))}</code>
        </p>
      ))}
      {row.info.length > 0 && <h2>What graders and tools told</h2>}
      {row.info.map((one, at) => (
        <details key={at} open={row.info.length < 4}>
          <summary>
            {one.key}
            {one.turn !== null && `, turn ${one.turn + 1}`}
          </summary>
          <pre>{visible(formatCell(one.value))}</pre>
        </details>
      ))}
      {Object.keys(row.tags ?? {}).length > 0 && (
        <p class="note lines">
          Tags:{" "}
          {Object.entries(row.tags)
            .map(([name, value]) => `${name}=${value}`)
            .join(", ")}
        </p>
      )}
      <Siblings data={data} />
    </aside>
  );
}

/** The reward as a sum of its parts. */
function Parts({ data }: { data: RolloutPage }) {
  return (
    <>
      <h2>Reward</h2>
      <table>
        <thead>
          <tr>
            <th scope="col">Part</th>
            <th scope="col" class="number">Value</th>
            <th scope="col" class="number">Weight</th>
            <th scope="col" class="number">Adds</th>
          </tr>
        </thead>
        <tbody>
          {data.reward_parts.map(({ name, value, weight }) => (
            <tr key={name}>
              <th scope="row">{visible(name)}</th>
              <td class="number">{formatNumber(value)}</td>
              <td class="number">{formatNumber(weight)}</td>
              <td class="number">{formatNumber(weight * value)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="note">
        {formatNumber(data.row.reward)} ={" "}
        {data.reward_parts.map(({ value, weight }) => `${formatNumber(weight)} \u00d7 ${formatNumber(value)}`).join(" + ")}
      </p>
    </>
  );
}

function Numbers({ title, values }: { title: string; values: Record<string, number> }) {
  const names = Object.keys(values ?? {});
  if (!names.length) return null;
  return (
    <>
      <h2>{title}</h2>
      <table>
        <tbody>
          {names.map((name) => (
            <tr key={name}>
              <th scope="row">{visible(name)}</th>
              <td class="number">{formatNumber(values[name])}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

interface Sibling {
  index: number;
  attempt: number;
  status: string;
  reward: number | null;
  address: string;
}

function Siblings({ data }: { data: RolloutPage }) {
  const siblings = rowsOf<Sibling>(data.siblings.columns as never);
  const mine = sideOf(addressOf(data));
  if (siblings.length < 2) return null;
  return (
    <>
      <h2>Of the same group</h2>
      <table>
        <tbody>
          {siblings.map((one) => {
            const isThis = one.index === data.row.index && one.attempt === data.row.attempt;
            const other = sideOf(one.address);
            return (
              <tr key={one.address}>
                <td>{isThis ? <b>{one.index} (this)</b> : <Link to={one.address}>{one.index}</Link>}</td>
                <td>
                  <State state={one.status} />
                </td>
                <td class="number">{formatNumber(one.reward)}</td>
                <td>
                  {!isThis && mine && other && isThere(withQuery("/difference", { left: mine, right: other })) && (
                    <Link to={withQuery("/difference", { left: mine, right: other })}>difference</Link>
                  )}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </>
  );
}

/** The address that bars of a timeline have; of an eval, it is below its eval. */
function markOf(data: RolloutPage): string {
  const { eval: of } = data.addresses;
  return of ? `${of}/rollouts/${encodeURIComponent(data.row.group_id)}/${data.row.index}` : addressOf(data);
}

function addressOf({ run, row }: RolloutPage): string {
  return ofRun(run.key, "rollouts", row.group_id, String(row.index), String(row.attempt));
}
