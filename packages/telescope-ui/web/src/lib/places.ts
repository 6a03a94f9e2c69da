/** How far pages were scrolled, by entry of the browser's history, and the way back to that. */

const KEPT = "telescope.places";
/** A page that does not get its data, or has become shorter, is not waited for any longer. */
const WAIT_MS = 5000;
/** Any of these says that the reader has taken over. */
const OF_READER = ["wheel", "touchstart", "keydown", "pointerdown"];

let entry = "";
let places: Record<string, number> = {};
/** Where the page is on its way to. */
let wanted: number | null = null;
let frame = 0;

function named(state: unknown): string {
  const found = (state as { entry?: unknown } | null)?.entry;
  return typeof found === "string" ? found : "";
}

/** The state of a new entry of the history. */
export function newEntry(): { entry: string } {
  entry = crypto.getRandomValues(new Uint32Array(2)).join("-");
  return { entry };
}

/** Note how far the page is scrolled; called before another entry is shown. */
export function leave(): void {
  if (entry) places[entry] = wanted ?? scrollY;
  stop();
}

function stop(): void {
  wanted = null;
  cancelAnimationFrame(frame);
  for (const name of OF_READER) removeEventListener(name, stop);
}

/** No part of the page waits for data, and it is high enough. */
function isReady(place: number): boolean {
  if (document.querySelector("[aria-busy=true], p.empty[role=status]")) return false;
  return document.documentElement.scrollHeight - innerHeight >= place;
}

function comeTo(place: number): void {
  wanted = place;
  const until_ms = performance.now() + WAIT_MS;
  for (const name of OF_READER) addEventListener(name, stop, { passive: true });
  const look = () => {
    if (!isReady(place) && performance.now() < until_ms) {
      frame = requestAnimationFrame(look);
      return;
    }
    stop();
    scrollTo(0, place);
  };
  frame = requestAnimationFrame(look);
}

/** Show the entry that the history has come to as far down as it was left. */
function arrive(): void {
  entry = named(history.state);
  if (entry) comeTo(places[entry] ?? 0);
  else history.replaceState(newEntry(), "");
}

/** Take the places of pages from the browser, which looks for them before a page has its data. */
export function keepPlaces(): void {
  history.scrollRestoration = "manual";
  try {
    places = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") as Record<string, number>;
  } catch {
    // Without a storage, places are kept until the page is loaded anew.
  }
  arrive();
  addEventListener("popstate", () => {
    leave();
    arrive();
  });
  addEventListener("pagehide", () => {
    leave();
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(places));
    } catch {
      // As above.
    }
  });
}
