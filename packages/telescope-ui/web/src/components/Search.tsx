/** A search that goes on by itself: its hits as they come, how far it is, and a way to stop it. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { withQuery } from "../lib/address.ts";
import { rowsOf, type Cell, type Columns } from "../lib/columns.ts";
import { load } from "../lib/data.ts";
import { plural } from "../lib/format.ts";
import { Empty, Trouble } from "./States.tsx";

export type Hit = Record<string, Cell> & { address: string };

/** Hits after which it pauses, until somebody wants more. */
const PAUSE = 50;

/** An answer of a search: some hits, and where it goes on. */
export interface Searched {
  columns: Columns;
  search?: { next_cursor: string | null };
}

/** How far a search is. */
export interface Progress {
  done: number;
  of: number;
  /** What was searched, after the number of hits. */
  text: string;
}

interface Found<Page> {
  hits: Hit[];
  cursor: string | null;
  pages: Page[];
}

/** What is known after one more answer. */
function foundIn<Page extends Searched>(page: Page, before?: Found<Page>): Found<Page> {
  return {
    hits: [...(before?.hits ?? []), ...rowsOf<Hit>(page.columns as never)],
    cursor: page.search?.next_cursor ?? null,
    pages: [...(before?.pages ?? []), page],
  };
}

interface Props<Page> {
  address: string;
  first: Page;
  /** `first` is of another search, and that of this one is on its way. */
  isOld: boolean;
  /** How far the search is after these answers. */
  progressOf: (pages: Page[]) => Progress;
  children: (hits: Hit[]) => ComponentChildren;
}

export function Search<Page extends Searched>({ address, first, isOld, progressOf, children }: Props<Page>) {
  const [found, set] = useState(() => foundIn(first));
  const [wanted, want] = useState(PAUSE);
  const [isStopped, stop] = useState(false);
  const [trouble, setTrouble] = useState("");
  const { hits, cursor, pages } = found;
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
    load<Page>(withQuery(address, { cursor }), leave.signal).then(
      (page) => set((before) => foundIn(page, before)),
      (error: unknown) => leave.signal.aborted || setTrouble(error instanceof Error ? error.message : String(error)),
    );
    return () => leave.abort();
  }, [searches, cursor, first]);
  const { done, of, text } = progressOf(pages);
  const more = () => {
    setTrouble("");
    stop(false);
    if (hits.length >= wanted) want(hits.length + PAUSE);
  };
  return (
    <>
      <div class="tools" role="status">
        {searches && <progress max={of} value={done} aria-label="what is searched" />}
        <span class="faint">
          {plural(hits.length, "rollout")} found{text}
          {cursor === null && "; all are searched"}.
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
      {hits.length === 0 && cursor === null && <Empty>No rollout says this.</Empty>}
    </>
  );
}
