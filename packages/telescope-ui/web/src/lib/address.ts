/** Addresses of pages: a path and a query. The same addresses name their data. */

export interface Address {
  path: string;
  /** Parts of the path, not escaped. */
  parts: string[];
  query: URLSearchParams;
}

/** What only the page knows, and the server leaves out: `ui.view=tokens`. */
export const OWN = "ui.";

export function parseAddress(text: string): Address {
  const [path = "", query = ""] = splitOnce(text, "?");
  const parts = path.split("/").filter(Boolean).map(unescaped);
  return { path: path || "/", parts, query: new URLSearchParams(query) };
}

function splitOnce(text: string, mark: string): [string, string] {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function unescaped(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function joined(path: string, query: URLSearchParams): string {
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

type Value = string | number | boolean | readonly string[] | null | undefined;

/** Return `address` with parameters set; null, undefined, "" and [] take one away. */
export function withQuery(address: string, changes: Record<string, Value>): string {
  const { path, query } = parseAddress(address);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    if (Array.isArray(value)) for (const one of value) query.append(name, one);
    else if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return joined(path, query);
}

/** The address of the data of a page: without what only the page knows. */
export function dataAddress(address: string): string {
  const { path, query } = parseAddress(address);
  for (const name of [...query.keys()]) if (name.startsWith(OWN)) query.delete(name);
  return joined(path, query);
}

/** The address of a page of a run. */
export function ofRun(key: string, ...parts: string[]): string {
  return ["/runs", key, ...parts].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");
}

/** A path in the one form that the server writes: in each part all but letters, digits and `._-` is escaped. */
export function canonical(path: string): string {
  const { parts } = parseAddress(path);
  const escaped = (part: string) =>
    [...new TextEncoder().encode(part)]
      .map((byte) => (/[A-Za-z0-9._-]/.test(String.fromCharCode(byte)) ? String.fromCharCode(byte) : `%${byte.toString(16).toUpperCase().padStart(2, "0")}`))
      .join("");
  return `/${parts.map(escaped).join("/")}`;
}

/** A rollout's address as a side of a difference: RUN/GROUP/INDEX/ATTEMPT, or null. */
export function sideOf(address: string): string | null {
  const match = /^\/runs\/([^/]+)\/rollouts\/([^/]+)\/([^/]+)\/([^/?]+)$/.exec(address);
  return match ? match.slice(1).join("/") : null;
}
