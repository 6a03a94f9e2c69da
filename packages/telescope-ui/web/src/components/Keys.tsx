/** Keys that work on every page, and the list of all keys. */

import { useEffect, useRef } from "preact/hooks";
import { ofRun } from "../lib/address.ts";
import { go } from "../lib/router.ts";

const PAGES: Record<string, string> = {
  o: "",
  r: "rollouts",
  t: "timeline",
  i: "infra",
  e: "evals",
  l: "logs",
  c: "config",
};

const HELP: [string, string][] = [
  ["?", "show or hide these keys"],
  ["g h", "all runs"],
  ["g o", "overview of the run"],
  ["g r, g t, g i", "rollouts, timeline, infra"],
  ["g e, g l, g c", "evals, logs, config"],
  ["/", "to the search field of the page"],
  ["j, k", "one rollout on or back"],
  ["left, right, Home, End, Enter", "in a chart: move, and open what is there"],
  ["W, S", "in a chart over steps: zoom in, show all"],
  ["W, S, A, D", "in the timeline: zoom in, zoom out, to the left, to the right"],
  ["left, right, Home, End", "among tokens: one on or back, to the first or the last"],
];

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && target.closest("input, select, textarea, [contenteditable]") !== null;

export function Keys({ run }: { run: string }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    let isGoing = false;
    const pressed = (event: KeyboardEvent) => {
      if (isTyping(event.target) || event.metaKey || event.ctrlKey || event.altKey) return;
      const going = isGoing;
      isGoing = event.key === "g";
      if (going && event.key === "h") go("/");
      else if (going && run && Object.hasOwn(PAGES, event.key)) {
        const page = PAGES[event.key];
        go(page ? ofRun(run, page) : ofRun(run));
      } else if (event.key === "?") {
        if (dialog.current?.open) dialog.current.close();
        else dialog.current?.showModal();
      } else if (event.key === "/") {
        const field = document.querySelector<HTMLInputElement>("input[type=search]");
        if (!field) return;
        field.focus();
        field.select();
      } else if (event.key === "j" || event.key === "k") {
        document.querySelector<HTMLAnchorElement>(`a[data-key=${event.key}]`)?.click();
      } else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, [run]);
  return (
    <dialog ref={dialog} aria-label="Keys">
      <h2>Keys</h2>
      <dl class="facts">
        {HELP.map(([keys, what]) => (
          <div key={keys + what}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <form method="dialog">
        <button type="submit">Close</button>
      </form>
    </dialog>
  );
}
