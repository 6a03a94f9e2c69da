/** A search that goes on by itself: its hits as they come, how far it is, and a way to stop it. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { withQuery } from "../lib/address.ts";
import { rowsOf, type Cell } from "../lib/columns.ts";
import { load } from "../lib/data.ts";
import { formatNumber, plural } from "../lib/format.ts";
import type { RolloutsPage } from "../lib/types.ts";
import { Empty, Trouble } from "./States.tsx";

export type Hit = Record<string, Cell> & { address: string };

/** Hits after which it pauses, until somebody wants more. */
const PAUSE = 50;

interface Found {
  hits: Hit[];
  cursor: string | null;
  /** Oldest and newest step that were searched. */
  steps: [number, number] | null;
}

/** What is known after one more answer: a search goes from the newest step to the oldest. */
function foundIn({ columns, search }: RolloutsPage, before?: Found): Found {
  const [oldest, newest] = search?.steps_searched ?? before?.steps ?? [null, null];
  return {
    hits: [...(before?.hits ?? []), ...rowsOf<Hit>(columns as never)],
    cursor: search?.next_cursor ?? null,
    steps: oldest === null || newest === null ? null : [oldest, before?.steps?.[1] ?? newest],
  };
}

interface Props {
  address: string;
  first: RolloutsPage;
  /** `first` is of another search, and that of this one is on its way. */
  isOld: boolean;
  children: (hits: Hit[]) => ComponentChildren;
}

export function Search({ address, first, isOld, children }: Props) {
  const [found, set] = useState(() => foundIn(first));
  const [wanted, want] = useState(PAUSE);
  const [isStopped, stop] = useState(false);
  const [trouble, setTrouble] = useState("");
  const { hits, cursor, steps } = found;
  useEffect(() => {
    set(foundIn(first));
    want(PAUSE);
    stop(false);
    setTrouble("");
  }, [first]);
  const searches = cursor !== null && !isOld && hits.length < wanted && !isStopped && !trouble;
  useEffect(() => {
    if (!searches) return;
    const leave = new AbortController();
    load<RolloutsPage>(withQuery(address, { cursor }), leave.signal).then(
      (page) => set((before) => foundIn(page, before)),
      (error: unknown) => leave.signal.aborted || setTrouble(error instanceof Error ? error.message : String(error)),
    );
    return () => leave.abort();
  }, [searches, cursor, first]);
  const query = new URLSearchParams(address.split("?")[1] ?? "");
  const from = Math.max(first.steps.first ?? 0, Number(query.get("step_from") ?? -Infinity));
  const to = Math.min(first.steps.last ?? 0, Number(query.get("step_to") ?? Infinity));
  const more = () => {
    setTrouble("");
    stop(false);
    if (hits.length >= wanted) want(hits.length + PAUSE);
  };
  return (
    <>
      <div class="tools" role="status">
        {searches && <progress max={to - from + 1} value={steps ? to - steps[0] + 1 : 0} aria-label="steps that are searched" />}
        <span class="faint">
          {plural(hits.length, "rollout")} found{steps && ` in steps ${formatNumber(steps[0])} to ${formatNumber(steps[1])}`}
          {cursor === null ? "; all are searched." : ` of ${formatNumber(from)} to ${formatNumber(to)}.`}
        </span>
        {searches && (
          <button type="button" onClick={() => stop(true)}>
            Stop
          </button>
        )}
        {!searches && cursor !== null && (
          <button type="button" onClick={more}>
            Search on
          </button>
        )}
      </div>
      {trouble && <Trouble message={trouble} />}
      {hits.length > 0 && children(hits)}
      {hits.length === 0 && cursor === null && <Empty>No rollout that the filters leave says this.</Empty>}
    </>
  );
}
