/** The width that an element has on the page, as it changes. */

import type { RefObject } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

export function useWidth<T extends Element>(first = 600): [RefObject<T | null>, number] {
  const ref = useRef<T>(null);
  const [width, set] = useState(first);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return;
    const measure = () => {
      const found = Math.floor(element.getBoundingClientRect().width);
      if (found > 0) set(found);
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}
