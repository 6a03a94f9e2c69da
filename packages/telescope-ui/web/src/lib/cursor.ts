/** Where charts over the same axis are read: the pointer over one of them shows in all. */

import { useEffect, useState } from "preact/hooks";

type Place = number | null;

const groups = new Map<string, Set<(at: Place) => void>>();

/** Return the place, and what moves it in every chart of `group`; a chart without a group has its own. */
export function useCursor(group: string | undefined): [Place, (to: Place) => void] {
  const [at, set] = useState<Place>(null);
  useEffect(() => {
    if (group === undefined) return;
    const members = groups.get(group) ?? new Set();
    groups.set(group, members.add(set));
    return () => {
      members.delete(set);
    };
  }, [group]);
  const move = (to: Place) => {
    if (group === undefined) set(to);
    else for (const one of groups.get(group) ?? []) one(to);
  };
  return [at, move];
}
