/** The data of pages: asked of the server, or read from an export, which is a folder of scripts or one file. */

import { useEffect, useRef, useState } from "preact/hooks";
import { canonical, dataAddress, joined, parseAddress } from "./address.ts";
import { exported, type Export } from "./router.ts";
import { useLive } from "./live.ts";
import { narrowed, unanswered } from "./narrow.ts";
import type { ConfigPage, RolloutPage } from "./types.ts";

export class DataError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

interface Refusal {
  error?: { status: number; message: string };
}

export async function load<T>(address: string, signal?: AbortSignal): Promise<T> {
  const asked = dataAddress(address);
  const data = exported() ? await loadExported(asked) : await loadServed(asked, signal);
  const refusal = (data as Refusal).error;
  if (refusal && typeof refusal === "object") throw new DataError(refusal.message, refusal.status);
  return data as T;
}

async function loadServed(address: string, signal?: AbortSignal): Promise<unknown> {
  const options: RequestInit = { headers: { accept: "application/json" } };
  if (signal) options.signal = signal;
  let answer: Response;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    const why = "telescope ui does not answer; is it still running? This page tries again by itself.";
    throw new DataError(why, 0);
  }
  try {
    return parsed(await answer.text());
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new DataError(`expected JSON, got an answer with status ${answer.status}`, answer.status);
  }
}

/** A number with so many digits that it may be another one in JavaScript, such as a seed of 64 bits. */
const LONG = /(?<![\d.eE+])\d{16,}(?![\d.eE])/;

/** Return the value of a text of JSON, and whole numbers that would be rounded as the text that they are. */
export function parsed(text: string): unknown {
  if (!LONG.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_key: string, value: unknown, context?: { source?: string }) => {
    const isRounded = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
    // Browsers that do not say what was written round it.
    return isRounded && /^-?\d+$/.test(context?.source ?? "") ? context?.source : value;
  });
}

/** Read the data of all pages, where they stand in the file of an export. */
export async function unpack(): Promise<void> {
  const all = exported();
  if (!all?.packed) return;
  const bytes = Uint8Array.from(atob(all.packed), (one) => one.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  all.loaded = parsed(await new Response(text).text()) as Record<string, unknown>;
  all.pages = Object.fromEntries(Object.keys(all.loaded).map((address) => [address, ""]));
  delete all.packed;
}

/** The page of an export that answers `address`, and what of the address it cannot answer. */
function exportedPage(all: Export, address: string): { page: string; missing: string[] } | null {
  const { path: asked, query } = parseAddress(address);
  if (Object.hasOwn(all.pages, address)) return { page: address, missing: [] };
  const path = canonical(asked);
  if (Object.hasOwn(all.pages, path)) return { page: path, missing: unanswered(path, query) };
  const runs = new URLSearchParams();
  for (const run of query.getAll("run")) runs.append("run", run);
  const compared = joined(path, runs);
  return Object.hasOwn(all.pages, compared) ? { page: compared, missing: unanswered(path, query) } : null;
}

/** Whether there is a page at an address: an export has some of them only. */
export function isThere(address: string): boolean {
  const all = exported();
  if (!all) return true;
  const asked = dataAddress(address);
  const { path, query } = parseAddress(asked);
  if (path === "/difference") {
    return ["left", "right"].every((side) => Object.hasOwn(all.pages, canonical(rolloutOf(query.get(side) ?? ""))));
  }
  const found = exportedPage(all, asked);
  return found !== null && found.missing.length === 0;
}

const scripts = new Map<string, Promise<void>>();

async function loadExported(address: string): Promise<unknown> {
  const all = exported();
  const { path, query } = parseAddress(address);
  if (path === "/difference") return differenceOf(query.get("left") ?? "", query.get("right") ?? "");
  const found = all ? exportedPage(all, address) : null;
  if (!all || !found) {
    throw new DataError("this page is not part of the export; telescope ui on the run folder has it", 404);
  }
  const { page, missing } = found;
  if (missing.length) {
    const names = missing.join(", ");
    throw new DataError(`the export has this page without ${names}; telescope ui on the run folder answers it`, 404);
  }
  if (!Object.hasOwn(all.loaded, page) && !scripts.has(page)) scripts.set(page, addScript(all.pages[page] ?? "", all));
  await scripts.get(page);
  return narrowed(path, all.loaded[page], query);
}

/** The page of a difference, made of the pages of both rollouts and of the settings of their runs. */
async function differenceOf(left: string, right: string): Promise<unknown> {
  const sides = await Promise.all([left, right].map(sideOfExport));
  const [one, other] = sides as [Side, Side];
  const names = [...new Set([...one.settings.keys(), ...other.settings.keys()])];
  const differ = names.filter((name) => JSON.stringify(one.settings.get(name)) !== JSON.stringify(other.settings.get(name)));
  const settings = differ.map((name) => ({
    name,
    values: { left: one.settings.get(name), right: other.settings.get(name) },
  }));
  return { page: "difference", left: one.page, right: other.page, settings };
}

interface Side {
  page: { run: unknown; row: unknown; messages: unknown; address: string };
  settings: Map<string, unknown>;
}

/** The address of a rollout that is a side of a difference: RUN/GROUP/INDEX/ATTEMPT. */
function rolloutOf(side: string): string {
  const [run = "", ...key] = side.split("/");
  return ["/runs", run, "rollouts", ...key].join("/");
}

async function sideOfExport(side: string): Promise<Side> {
  const [run = ""] = side.split("/");
  const address = rolloutOf(side);
  const rollout = (await loadExported(address)) as RolloutPage;
  const config = (await loadExported(`/runs/${run}/config`)) as ConfigPage;
  return {
    page: { run: rollout.run, row: rollout.row, messages: rollout.messages, address },
    settings: new Map(config.settings.map((one) => [one.name, one.value])),
  };
}

function addScript(place: string, { is_complete }: Export): Promise<void> {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = place;
    script.onload = () => resolve();
    const why = is_complete === false ? "the export was interrupted before this page was written" : `the file ${place} of the export is missing`;
    script.onerror = () => reject(new DataError(why, 404));
    document.head.append(script);
  });
}

export interface Loaded<T> {
  data: T | null;
  error: DataError | null;
  /** The data is of an address before, and the new one is on its way. */
  isOld: boolean;
}

/** Names of runs and evals by the keys that addresses have, as far as their pages were loaded. */
const names = new Map<string, string>();
const nameListeners = new Set<() => void>();

function noteName(data: unknown): void {
  const { key, name } = (data as { run?: { key?: string; name?: string } | null }).run ?? {};
  if (!key || !name || names.get(key) === name) return;
  names.set(key, name);
  for (const listener of nameListeners) listener();
}

/** The name of a run or an eval; until it is known, its key. */
export function useRunName(key: string): string {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((count) => count + 1);
    nameListeners.add(listener);
    return () => {
      nameListeners.delete(listener);
    };
  }, []);
  return names.get(key) ?? key;
}

const RETRY_MS = 3000;
/** While the server still reads a run, its answers are of a part of it. */
const GROWING_MS = 400;

function isGrowing(data: unknown): boolean {
  return !exported() && (data as { index?: { is_complete?: boolean } }).index?.is_complete === false;
}

/**
 * Return the data of `address`, and again whenever one of `parts` of `run` changes.
 *
 * What was there stays on the page until the new data comes, so that nothing flickers.
 */
export function useData<T>(address: string | null, run?: string, parts?: readonly string[]): Loaded<T> {
  const change = useLive(run, parts);
  const [state, set] = useState<{ of: string | null } & Omit<Loaded<T>, "isOld">>({
    of: null,
    data: null,
    error: null,
  });
  const [retries, retry] = useState(0);
  const asked = useRef(0);
  useEffect(() => {
    if (address === null) return;
    const stop = new AbortController();
    const number = ++asked.current;
    let timer = 0;
    load<T>(address, stop.signal).then(
      (data) => {
        if (number !== asked.current) return;
        noteName(data);
        set({ of: address, data, error: null });
        if (isGrowing(data)) timer = window.setTimeout(() => retry((count) => count + 1), GROWING_MS);
      },
      (error: unknown) => {
        if (stop.signal.aborted || number !== asked.current) return;
        const told = error instanceof DataError ? error : new DataError(String(error), -1);
        set((before) => ({ of: address, data: before.of === address ? before.data : null, error: told }));
        if (told.status === 0) timer = window.setTimeout(() => retry((count) => count + 1), RETRY_MS);
      },
    );
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [address, change, retries]);
  const { of, data, error } = state;
  return { data, error: of === address ? error : null, isOld: of !== address };
}
