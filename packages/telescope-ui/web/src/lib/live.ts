/** What changes while a run goes on: one connection for the page, and who wants to hear of it. */

import { useEffect, useState } from "preact/hooks";
import { exported } from "./router.ts";

interface Change {
  run: string;
  parts: string[];
}

type Listener = (run: string | null, parts: readonly string[]) => void;

const listeners = new Set<Listener>();
const statusListeners = new Set<(isOpen: boolean) => void>();
let source: EventSource | null = null;
let isOpen = false;

function tell(open: boolean): void {
  isOpen = open;
  for (const listener of statusListeners) listener(open);
}

function connect(): void {
  if (source || exported()) return;
  source = new EventSource("/live");
  source.onopen = () => tell(true);
  source.onerror = () => tell(false);
  source.addEventListener("change", (event) => {
    const change = JSON.parse((event as MessageEvent<string>).data) as Change;
    for (const listener of listeners) listener(change.run, change.parts);
  });
  source.addEventListener("runs", () => {
    for (const listener of listeners) listener(null, ["runs"]);
  });
}

/** At most one more request in this time, however fast a run writes. */
const PAUSE_MS = 700;

/** Return a number that grows when one of `parts` of `run` changes; of any run if run is "". */
export function useLive(run?: string, parts?: readonly string[]): number {
  const [count, set] = useState(0);
  const wanted = parts?.join(" ");
  useEffect(() => {
    if (wanted === undefined || run === undefined) return;
    connect();
    let timer = 0;
    let last = 0;
    const names = new Set(wanted.split(" "));
    const listener: Listener = (changed, kinds) => {
      const fits = changed === null ? run === "" : run === "" || changed === run;
      if (!fits || !(run === "" || kinds.some((kind) => names.has(kind))) || timer) return;
      const wait = Math.max(0, last + PAUSE_MS - performance.now());
      timer = window.setTimeout(() => {
        timer = 0;
        last = performance.now();
        set((before) => before + 1);
      }, wait);
    };
    listeners.add(listener);
    return () => {
      listeners.delete(listener);
      clearTimeout(timer);
    };
  }, [run, wanted]);
  return count;
}

/** Whether changes are being heard of. */
export function useIsLive(): boolean {
  const [open, set] = useState(isOpen);
  useEffect(() => {
    statusListeners.add(set);
    connect();
    return () => {
      statusListeners.delete(set);
    };
  }, []);
  return open;
}
