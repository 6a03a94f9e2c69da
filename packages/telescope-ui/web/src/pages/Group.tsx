import { useMemo } from "preact/hooks";
import { Conversation, RawSwitch, saidIn } from "../components/Conversation.tsx";
import { Facts } from "../components/Facts.tsx";
import { Link } from "../components/Link.tsx";
import { Ready, State } from "../components/States.tsx";
import { ofRun, sideOf, withQuery } from "../lib/address.ts";
import { isThere, useData } from "../lib/data.ts";
import { alikeUpTo } from "../lib/diff.ts";
import { formatCell, formatNumber, plural } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import type { GroupPage } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

/** Characters that are shown before and after the place where a rollout is another one. */
const BEFORE = 60;
const AFTER = 320;

export function Group({ address, query, run }: PageProps) {
  const loaded = useData<GroupPage>(address, run, ["rollouts"]);
  const isRaw = query.get("ui.raw") === "yes";
  return (
    <Ready loaded={loaded}>
      {(data) => (
        <>
          <p class="crumbs">
            {data.environment} /{" "}
            {data.example_id ? (
              <Link to={ofRun(run, "examples", data.environment, data.example_id)}>{visible(data.example_id)}</Link>
            ) : (
              "no example"
            )}
          </p>
          <h1>
            Group {data.group_id} of step {formatNumber(data.step)}
          </h1>
          <Facts
            facts={[
              ["Mean reward", formatNumber(data.reward.mean)],
              ["Deviation", formatNumber(data.reward.deviation)],
              ["Lowest", formatNumber(data.reward.minimum)],
              ["Highest", formatNumber(data.reward.maximum)],
              ["Scored", formatNumber(data.reward.count)],
              ...Object.entries(data.golden_answers).map(([name, value]): [string, string] => [
                `Gold ${name}`,
                visible(formatCell(value)),
              ]),
            ]}
          />
          {data.is_cut && <p class="note">The group has more rollouts than are shown.</p>}
          <div class="tools">
            <RawSwitch address={address} isRaw={isRaw} />
          </div>
          <details open>
            <summary>What all of them were asked</summary>
            <Conversation messages={data.prompt} isRaw={isRaw} />
          </details>
          <h2>{plural(data.rollouts.length, "rollout")}, the highest reward first</h2>
          <Rollouts data={data} isRaw={isRaw} />
        </>
      )}
    </Ready>
  );
}

/** The rollouts below each other, each with the place where it first differs from the best one. */
function Rollouts({ data, isRaw }: { data: GroupPage; isRaw: boolean }) {
  const rollouts = useMemo(() => {
    const known = (reward: number | null) => reward ?? -Infinity;
    const sorted = [...data.rollouts].sort((a, b) => known(b.row.reward) - known(a.row.reward) || a.row.index - b.row.index);
    const said = sorted.map((one) => one.messages.map(saidIn).join("\n\n"));
    const others = said.slice(1).map((one) => alikeUpTo(said[0] ?? "", one));
    const alike = [others.length ? Math.min(...others) : 0, ...others];
    return sorted.map((one, at) => ({ ...one, said: said[at] ?? "", alike: alike[at] ?? 0 }));
  }, [data]);
  const best = rollouts[0];
  return (
    <ol class="rollouts">
      {rollouts.map(({ row, messages, address: place, said, alike }) => {
        const [left, right] = [best && sideOf(best.address), sideOf(place)];
        const difference = withQuery("/difference", { left, right });
        const isAllShown = alike <= BEFORE && said.length <= alike + AFTER;
        const isSame = alike === said.length && best?.said === said;
        return (
          <li class="card" key={place}>
            <div class="head">
              <Link to={place}>
                Rollout {row.index}
                {row.attempt > 1 && `, attempt ${row.attempt}`}
              </Link>
              <State state={row.status} />
              <b>{formatNumber(row.reward)}</b>
              <span class="faint">
                advantage {formatNumber(row.advantage, 3)}, {plural(row.num_completion_tokens, "token")}
                {row.is_truncated && ", truncated"}
              </span>
              {best && best.address !== place && isThere(difference) && <Link to={difference}>difference from rollout {best.row.index}</Link>}
            </div>
            {row.error && <p class="trouble">{visible(row.error)}</p>}
            {best?.address !== place && isSame ? (
              <p class="faint">It says the same as rollout {best?.row.index}.</p>
            ) : (
              <pre class="text">
                <span class="faint">
                  {alike > BEFORE && "\u2026"}
                  {visible(said.slice(Math.max(0, alike - BEFORE), alike))}
                </span>
                {alike > 0 && <mark title="From here on it differs">{"\u25b8"}</mark>}
                {visible(said.slice(alike, alike + AFTER))}
                {said.length > alike + AFTER && "\u2026"}
              </pre>
            )}
            {!isAllShown && (
              <details>
                <summary>All of it, {plural(said.length, "character")}</summary>
                <Conversation messages={messages} isRaw={isRaw} />
              </details>
            )}
          </li>
        );
      })}
    </ol>
  );
}
