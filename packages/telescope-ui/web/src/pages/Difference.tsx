import { saidIn } from "../components/Conversation.tsx";
import { Link } from "../components/Link.tsx";
import { Empty, Ready } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { useData } from "../lib/data.ts";
import { diffTexts } from "../lib/diff.ts";
import { formatCell, formatNumber, nameOfRun } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import type { DifferencePage, DifferenceSide, Message } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

const FACTS = ["step", "status", "stop_reason", "reward", "advantage", "num_turns", "num_completion_tokens", "newest_version"] as const;

export function Difference({ address }: PageProps) {
  const loaded = useData<DifferencePage>(address);
  return (
    <Ready loaded={loaded}>
      {({ left, right, settings }) => {
        const count = Math.max(left.messages.length, right.messages.length);
        return (
          <>
            <h1>Two rollouts</h1>
            <p>
              <span class="diff-left">left</span>: {name(left)} <Link to={left.address}>open</Link>
              <br />
              <span class="diff-right">right</span>: {name(right)} <Link to={right.address}>open</Link>
            </p>
            <Table
              caption="What is known of both"
              rows={[...FACTS]}
              keyOf={(one) => one}
              columns={[
                { name: "What", cell: (one) => one.replaceAll("_", " ") },
                { name: "Left", isNumber: true, cell: (one) => formatCell(left.row[one]) },
                { name: "Right", isNumber: true, cell: (one) => formatCell(right.row[one]) },
              ]}
            />
            <h2>What they say</h2>
            {Array.from({ length: count }, (_, at) => (
              <Both key={at} left={left.messages[at]} right={right.messages[at]} />
            ))}
            {settings.length > 0 && <h2>Settings of their runs that differ</h2>}
            {settings.length > 0 && (
              <Table
                caption="Settings that differ"
                rows={settings}
                keyOf={(row) => row.name}
                columns={[
                  { name: "Setting", cell: (row) => <code>{row.name}</code> },
                  { name: "Left", cell: (row) => formatCell(row.values.left) },
                  { name: "Right", cell: (row) => formatCell(row.values.right) },
                ]}
              />
            )}
            {count === 0 && <Empty>Neither has messages.</Empty>}
          </>
        );
      }}
    </Ready>
  );
}

const name = ({ run, row }: DifferenceSide) =>
  `${nameOfRun(run)}, step ${formatNumber(row.step)}, group ${row.group_id}, rollout ${row.index}, reward ${formatNumber(row.reward)}`;

function Both({ left, right }: { left: Message | undefined; right: Message | undefined }) {
  const roles = [left?.role, right?.role];
  const role = roles[0] === roles[1] ? roles[0] : `${roles[0] ?? "nothing"} / ${roles[1] ?? "nothing"}`;
  const [before, after] = [left, right].map((one) => (one ? saidIn(one) : "")) as [string, string];
  return (
    <section class={`message message-${left?.role ?? right?.role ?? ""}`}>
      <div class="role">{role}</div>
      {before === after ? (
        <details open={before.length < 300}>
          <summary>The same in both</summary>
          <pre class="text">{visible(before)}</pre>
        </details>
      ) : (
        <pre class="text">
          {diffTexts(before, after).map((piece, at) =>
            piece.kind === "same" ? (
              visible(piece.text)
            ) : piece.kind === "left" ? (
              <del key={at} class="diff-left">
                {visible(piece.text)}
              </del>
            ) : (
              <ins key={at} class="diff-right">
                {visible(piece.text)}
              </ins>
            ),
          )}
        </pre>
      )}
    </section>
  );
}
