/** What stands where data are not there: on their way, refused, or none. */

import type { ComponentChildren } from "preact";
import type { Loaded } from "../lib/data.ts";
import { visible } from "../lib/visible.ts";

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Loading() {
  return (
    <p class="empty" role="status">
      Loading...
    </p>
  );
}

/** What went wrong; what a library said of it comes after the first line, and is shown when it is asked for. */
export function Trouble({ message }: { message: string }) {
  const [said, ...details] = message.split("\n");
  return (
    <div class="trouble" role="alert">
      {said}
      {details.length > 0 && (
        <details>
          <summary>details</summary>
          <pre>{visible(details.join("\n"))}</pre>
        </details>
      )}
    </div>
  );
}

interface Props<T> {
  loaded: Loaded<T>;
  children: (data: T) => ComponentChildren;
}

/** Sentences beside the data: `problems`, what of the run's files could not be read; `hints`, what of the address nothing has. */
function toldOf(data: unknown, name: "problems" | "hints"): string[] {
  const found = (data as Record<string, unknown> | null)?.[name];
  return Array.isArray(found) ? found.map(String) : [];
}

/** Show data once they are there; what went wrong above what was there before. */
export function Ready<T>({ loaded, children }: Props<T>) {
  return (
    <>
      {loaded.error && <Trouble message={loaded.error.message} />}
      {toldOf(loaded.data, "problems").map((problem) => (
        <Trouble key={problem} message={problem} />
      ))}
      {toldOf(loaded.data, "hints").map((hint) => (
        <p key={hint} class="note" role="status">
          {hint}
        </p>
      ))}
      {loaded.data !== null && (
        <div class={loaded.isOld || loaded.error?.status === 404 ? "is-old" : undefined} aria-busy={loaded.isOld}>
          {children(loaded.data)}
        </div>
      )}
      {loaded.data === null && !loaded.error && <Loading />}
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
          Reading: {files_done} of {files_total} {what}.{" "}
          <progress max={files_total} value={files_done} aria-label="what is read" />
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
