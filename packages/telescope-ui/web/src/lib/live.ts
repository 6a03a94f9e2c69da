/**
 * What changes while a run goes on. A browser allows six connections to a server, and one that listens is never free: so one
 * page of all that are open listens, and tells the others. When it is closed, another one takes its place.
 */

import { useEffect, useState } from "preact/hooks";
import { exported } from "./router.ts";

type Heard =
  /** Parts of a run have changed. */
  | { kind: "change"; run: string; parts: string[] }
  /** These runs have appeared, or are gone. */
  | { kind: "runs"; changed: string[] }
  /** Something may have been missed. */
  | { kind: "again" }
  /** Nothing has changed, and the server is there. */
  | { kind: "still" }
  /** A page that was opened just now asks whether the server is there. */
  | { kind: "asked" };

type Listener = (heard: Heard) => void;

export type Connection =
  /** Nothing was heard yet. */
  | "starting"
  | "live"
  /** Nothing is heard any more. */
  | "lost"
  /** The server is there, and does not take the token of this browser. */
  | "refused";

/** A page that has heard nothing for so long is not live. The server speaks every 5 s. */
const SILENCE_MS = 12_000;
const AGAIN_MS = 3000;

const listeners = new Set<Listener>();
const statusListeners = new Set<(connection: Connection) => void>();
let channel: BroadcastChannel | null = null;
let source: EventSource | null = null;
let connection: Connection = "starting";
let silence = 0;
let again = 0;

function tell(now: Connection): void {
  connection = now;
  for (const listener of statusListeners) listener(now);
}

function take(heard: Heard): void {
  clearTimeout(silence);
  silence = window.setTimeout(() => tell("lost"), SILENCE_MS);
  if (connection !== "live") tell("live");
  for (const listener of listeners) listener(heard);
}

function listen(): void {
  const pass = (heard: Heard) => {
    take(heard);
    channel?.postMessage(heard);
  };
  source = new EventSource("/live");
  source.onopen = () => pass({ kind: "still" });
  // From now on every change is told. One since a page asked for its data, or since another one listened, was not.
  source.addEventListener("ready", () => pass({ kind: "again" }));
  // Those that are told hear nothing then, and find out by themselves.
  source.onerror = () => {
    if (connection !== "refused") tell("lost");
    // After a refusal, and after some errors, a browser gives up; the server may come back.
    clearTimeout(again);
    if (source?.readyState === EventSource.CLOSED) again = window.setTimeout(() => void retry(), AGAIN_MS);
  };
  source.addEventListener("still", () => pass({ kind: "still" }));
  source.addEventListener("runs", (event) => {
    const { changed } = JSON.parse((event as MessageEvent<string>).data) as { changed: string[] };
    pass({ kind: "runs", changed });
  });
  source.addEventListener("change", (event) => {
    const { run, parts } = JSON.parse((event as MessageEvent<string>).data) as { run: string; parts: string[] };
    pass({ kind: "change", run, parts });
  });
}

function connect(): void {
  if (channel || source || exported()) return;
  if (navigator.locks) {
    channel = new BroadcastChannel("telescope live");
    channel.onmessage = (event: MessageEvent<Heard>) => {
      if (event.data.kind !== "asked") take(event.data);
      else if (source?.readyState === EventSource.OPEN) channel?.postMessage({ kind: "still" });
    };
    channel.postMessage({ kind: "asked" });
    // Granted to one page at a time, and held until it is closed.
    void navigator.locks.request("telescope live", () => {
      listen();
      return new Promise(() => {});
    });
    return;
  }
  // Without https and on another machine than this, pages know nothing of each other: one that nobody sees does not listen.
  const follow = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) listen();
  };
  document.addEventListener("visibilitychange", follow);
  listen();
  follow();
}

/** Ask whether the server is there, and have what may have been missed asked for again. */
export async function retry(): Promise<void> {
  clearTimeout(again);
  const status = await fetch("/static/app.css", { cache: "no-store" }).then(
    (answer) => answer.status,
    () => 0,
  );
  const isListening = source?.readyState === EventSource.OPEN;
  if (status === 200) {
    // Another page listens for this one, which will hear of it soon.
    if (!source) take({ kind: "again" });
    else if (!isListening) {
      source.close();
      listen();
    }
    return;
  }
  tell(status === 401 ? "refused" : "lost");
  if (source?.readyState === EventSource.CLOSED) again = window.setTimeout(() => void retry(), AGAIN_MS);
}

/** At most one more request in this time, however fast a run writes. */
const PAUSE_MS = 700;

/** Return a number that grows when one of `parts` of `run` changes, or it appears or is gone; of any run if run is "". */
export function useLive(run?: string, parts?: readonly string[]): number {
  const [count, set] = useState(0);
  const wanted = parts?.join(" ");
  useEffect(() => {
    if (wanted === undefined || run === undefined) return;
    connect();
    let timer = 0;
    let last = 0;
    const names = new Set(wanted.split(" "));
    const fits = (heard: Heard) => {
      if (heard.kind === "still" || heard.kind === "asked") return false;
      if (heard.kind === "again" || run === "") return true;
      if (heard.kind === "runs") return heard.changed.includes(run);
      return heard.kind === "change" && heard.run === run && heard.parts.some((part) => names.has(part));
    };
    const listener: Listener = (heard) => {
      if (timer || !fits(heard)) return;
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
export function useConnection(): Connection {
  const [now, set] = useState(connection);
  useEffect(() => {
    statusListeners.add(set);
    connect();
    return () => {
      statusListeners.delete(set);
    };
  }, []);
  return now;
}
