/** Which metrics are drawn: names to add and take away. */

import { useState } from "preact/hooks";

interface Props {
  names: string[];
  shown: string[];
  onChange: (names: string[]) => void;
}

export function Metrics({ names, shown, onChange }: Props) {
  const [text, setText] = useState("");
  const add = (name: string) => {
    setText("");
    if (!shown.includes(name)) onChange([name, ...shown]);
  };
  const wanted = text.toLowerCase();
  const found = wanted ? names.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 12) : [];
  return (
    <div>
      <div class="tools">
        <label>
          Find a metric
          <input
            type="search"
            value={text}
            placeholder={`one of ${names.length}`}
            onInput={(event) => setText(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && found[0] && add(found[0])}
          />
        </label>
      </div>
      {wanted && (
        <ul class="chosen" aria-label="Metrics found">
          {found.map((name) => (
            <li key={name}>
              <button type="button" onClick={() => add(name)} disabled={shown.includes(name)}>
                {name}
              </button>
            </li>
          ))}
          {!found.length && <li class="empty">No metric has this in its name.</li>}
        </ul>
      )}
    </div>
  );
}
