/** Light or dark: as the system says, until somebody chooses. */

import { useEffect, useLayoutEffect, useState } from "preact/hooks";

export type Theme = "light" | "dark";
const KEY = "telescope-theme";

function stored(): Theme | null {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : null;
  } catch {
    return null;
  }
}

export function useTheme(): [Theme, () => void] {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, set] = useState<Theme>(() => stored() ?? (system.matches ? "dark" : "light"));
  useEffect(() => {
    const changed = () => stored() ?? set(system.matches ? "dark" : "light");
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);
  // Before anything is painted, so that nothing flashes in the other colors.
  useLayoutEffect(() => {
    document.documentElement.dataset["theme"] = theme;
    dispatchEvent(new Event("telescope-theme"));
  }, [theme]);
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // A browser may refuse to keep anything; the choice then lasts as long as the page.
    }
    set(next);
  };
  return [theme, toggle];
}
