import type { ComponentChildren } from "preact";
import { href } from "../lib/router.ts";

interface Props {
  to: string;
  class?: string;
  title?: string;
  current?: boolean;
  children: ComponentChildren;
}

export function Link({ to, current, children, ...rest }: Props) {
  return (
    <a href={href(to)} aria-current={current ? "page" : undefined} {...rest}>
      {children}
    </a>
  );
}
