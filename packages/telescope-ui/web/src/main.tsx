import { render } from "preact";
import { App } from "./App.tsx";
import { unpack } from "./lib/data.ts";
import { keepPlaces } from "./lib/places.ts";
import { followLinks } from "./lib/router.ts";
import { showHidden } from "./lib/visible.ts";
import "./app.css";

const place = document.getElementById("app");
if (place) {
  keepPlaces();
  followLinks();
  showHidden();
  unpack().then(
    () => render(<App />, place),
    (error: unknown) => render(<p>This file needs a browser of 2023 or newer: {String(error)}</p>, place),
  );
}
