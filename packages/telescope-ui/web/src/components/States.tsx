/** What stands where data are not there: on their way, refused, or none. */

import type { ComponentChildren } from "preact";
import type { Loaded } from "../lib/data.ts";

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Trouble({ message }: { message: string }) {
  return (
    <p class="trouble" role="alert">
      {message}
    </p>
  );
}

interface Props<T> {
  loaded: Loaded<T>;
  children: (data: T) => ComponentChildren;
}

/** What of the run's files could not be read: the page shows the rest. */
function problemsOf(data: unknown): string[] {
  const found = (data as { problems?: unknown } | null)?.problems;
  return Array.isArray(found) ? found.map(String) : [];
}

/** Show data once they are there; what went wrong above what was there before. */
export function Ready<T>({ loaded, children }: Props<T>) {
  return (
    <>
      {loaded.error && <Trouble message={loaded.error.message} />}
      {problemsOf(loaded.data).map((problem) => (
        <Trouble key={problem} message={problem} />
      ))}
      {loaded.data !== null && (
        <div class={loaded.isOld ? "is-old" : undefined} aria-busy={loaded.isOld}>
          {children(loaded.data)}
        </div>
      )}
      {loaded.data === null && !loaded.error && (
        <p class="empty" role="status">
          Loading...
        </p>
      )}
    </>
  );
}

interface Index {
  files_done: number;
  files_total: number;
  is_complete: boolean;
  problems: string[];
}

export function IndexNote({ index, what = "steps are in, the newest first" }: { index: Index; what?: string }) {
  const { files_done, files_total, is_complete, problems } = index;
  return (
    <>
      {!is_complete && (
        <p class="note" role="status">
          Reading the run: {files_done} of {files_total} {what}.{" "}
          <progress max={files_total} value={files_done} aria-label="steps that are read" />
        </p>
      )}
      {problems.map((problem) => (
        <Trouble key={problem} message={problem} />
      ))}
    </>
  );
}

export function State({ state }: { state: string }) {
  return <span class={`state state-${state}`}>{state}</span>;
}
