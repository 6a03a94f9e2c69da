/** The data of pages: asked of the server, or read from the scripts of an exported folder. */

import { useEffect, useRef, useState } from "preact/hooks";
import { dataAddress, joined, parseAddress } from "./address.ts";
import { exported } from "./router.ts";
import { useLive } from "./live.ts";
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
    return await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new DataError(`expected JSON, got an answer with status ${answer.status}`, answer.status);
  }
}

/** An export holds each page once, without windows and filters: those fall away step by step. */
function exportedAddress(address: string): string | null {
  const pages = exported()?.pages ?? {};
  const { path, query } = parseAddress(address);
  const runs = new URLSearchParams();
  for (const run of query.getAll("run")) runs.append("run", run);
  const tried = [address, joined(path, runs), path];
  return tried.find((one) => Object.hasOwn(pages, one)) ?? null;
}

/** Whether two rollouts can be laid beside each other: an export has only some of them. */
export function canDiffer(...addresses: (string | undefined)[]): boolean {
  const all = exported();
  return !all || addresses.every((one) => one !== undefined && Object.hasOwn(all.pages, one));
}

const scripts = new Map<string, Promise<void>>();

async function loadExported(address: string): Promise<unknown> {
  const all = exported();
  const { path, query } = parseAddress(address);
  if (path === "/difference") return differenceOf(query.get("left") ?? "", query.get("right") ?? "");
  const found = exportedAddress(address);
  if (!all || found === null) {
    throw new DataError(
      "this page is not part of the exported folder; telescope ui on the run folder has it",
      404,
    );
  }
  const place = all.pages[found] ?? "";
  if (!scripts.has(found)) scripts.set(found, addScript(place));
  await scripts.get(found);
  return all.loaded[found];
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

async function sideOfExport(side: string): Promise<Side> {
  const [run = "", ...key] = side.split("/");
  const address = ["/runs", run, "rollouts", ...key].join("/");
  const rollout = (await loadExported(address)) as RolloutPage;
  const config = (await loadExported(`/runs/${run}/config`)) as ConfigPage;
  return {
    page: { run: rollout.run, row: rollout.row, messages: rollout.messages, address },
    settings: new Map(config.settings.map((one) => [one.name, one.value])),
  };
}

function addScript(place: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = place;
    script.onload = () => resolve();
    script.onerror = () => reject(new DataError(`the file ${place} of the export is missing`, 404));
    document.head.append(script);
  });
}

export interface Loaded<T> {
  data: T | null;
  error: DataError | null;
  /** The data is of an address before, and the new one is on its way. */
  isOld: boolean;
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
