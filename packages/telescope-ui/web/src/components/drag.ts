/** A stretch that is drawn over with the pointer, beside the click and the double click. */

import { useRef, useState } from "preact/hooks";

interface Asked {
  /** Where on the axis an event is. */
  placeUnder: (event: MouseEvent) => number | null;
  onDrag: ((from: number, to: number) => void) | undefined;
  onClick: (event: MouseEvent) => void;
  /** Where it is not there, a click need not wait for a second one. */
  onDouble: (() => void) | undefined;
}

/** A pointer that moved less has clicked. */
const LEAST_PIXELS = 4;
const DOUBLE_MS = 500;

export function useDrag({ placeUnder, onDrag, onClick, onDouble }: Asked) {
  const [span, setSpan] = useState<[number, number] | null>(null);
  const pressed = useRef<{ pixel: number; place: number } | null>(null);
  const hasDragged = useRef(false);
  const timer = useRef(0);
  const spanTo = (event: MouseEvent): [number, number] | null => {
    const place = placeUnder(event);
    if (!pressed.current || place === null) return null;
    const ends = [pressed.current.place, place].sort((a, b) => a - b);
    return ends as [number, number];
  };
  const stop = () => {
    pressed.current = null;
    setSpan(null);
  };
  const handlers = {
    onPointerDown: (event: PointerEvent) => {
      const place = placeUnder(event);
      hasDragged.current = false;
      if (onDrag && event.button === 0 && place !== null) pressed.current = { pixel: event.clientX, place };
    },
    onPointerMove: (event: PointerEvent) => {
      if (!pressed.current) return;
      if (!hasDragged.current && Math.abs(event.clientX - pressed.current.pixel) <= LEAST_PIXELS) return;
      if (!hasDragged.current) (event.currentTarget as Element).setPointerCapture(event.pointerId);
      hasDragged.current = true;
      setSpan(spanTo(event));
    },
    onPointerUp: (event: PointerEvent) => {
      const found = hasDragged.current ? spanTo(event) : null;
      stop();
      if (found && onDrag) onDrag(...found);
    },
    onPointerCancel: stop,
    onClick: (event: MouseEvent) => {
      if (hasDragged.current) return;
      clearTimeout(timer.current);
      if (!onDouble) onClick(event);
      else if (event.detail < 2) timer.current = window.setTimeout(() => onClick(event), DOUBLE_MS);
    },
    onDblClick: () => onDouble?.(),
  };
  return { span, handlers };
}
