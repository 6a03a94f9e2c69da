/** Where the page is: in the path of a server, or behind # in an export. */

import { useEffect, useState } from "preact/hooks";
import { leave, newEntry } from "./places.ts";

export interface Export {
  format: number;
  created_at: string;
  /** False while it is written, and for ever if that was interrupted. */
  is_complete?: boolean;
  pages: Record<string, string>;
  loaded: Record<string, unknown>;
  /** In an export of one file: the data of all pages by their addresses, as JSON in gzip in base64. */
  packed?: string;
  /** The page that is shown first. */
  first?: string;
}

declare global {
  interface Window {
    TELESCOPE_EXPORT?: Export;
  }
}

export const exported = (): Export | undefined => window.TELESCOPE_EXPORT;

export function here(): string {
  const all = exported();
  if (all) return decodeURI(location.hash.slice(1)) || all.first || "/";
  return location.pathname + location.search;
}

/** What a link has in `href`. */
export function href(address: string): string {
  return exported() ? `#${encodeURI(address)}` : address;
}

const listeners = new Set<() => void>();

export function go(address: string, how: "push" | "replace" = "push"): void {
  const target = exported() ? href(address) : address;
  if (how === "push") {
    leave();
    history.pushState(newEntry(), "", target);
  } else history.replaceState(history.state, "", target);
  for (const listener of listeners) listener();
}

/** The address of the page, whenever it changes. */
export function useAddress(): string {
  const [address, set] = useState(here);
  useEffect(() => {
    const changed = () => set(here());
    listeners.add(changed);
    addEventListener("popstate", changed);
    addEventListener("hashchange", changed);
    return () => {
      listeners.delete(changed);
      removeEventListener("popstate", changed);
      removeEventListener("hashchange", changed);
    };
  }, []);
  return address;
}

/** Follow links of our own without loading the page anew. */
export function followLinks(): void {
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey) return;
    if (event.shiftKey || event.altKey || !(event.target instanceof Element)) return;
    const link = event.target.closest("a");
    if (!link || link.target || link.hasAttribute("download") || exported()) return;
    if (link.origin !== location.origin || link.getAttribute("href")?.startsWith("#")) return;
    event.preventDefault();
    go(link.pathname + link.search);
    scrollTo(0, 0);
  });
}
