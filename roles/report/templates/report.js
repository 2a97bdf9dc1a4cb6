"use strict";
// Everything that comes from hosts goes through textContent; nothing is ever parsed as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const body = $("hosts").tBodies[0];
  const all = [...body.querySelectorAll("tr.host")];
  const fields = ["q", "status", "backend", "state", "cause"];
  const index = all.map((row) => ({
    row,
    text: `${row.textContent} ${row.dataset.more}`.replace(/\s+/g, " ").toLowerCase(),
    status: row.dataset.status,
    cells: [...row.querySelectorAll("[data-backend]")].map((cell) => ({
      backend: cell.dataset.backend, state: cell.dataset.state, cause: cell.dataset.cause,
    })),
  }));

  const el = (name, text, cls) => {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    if (cls) node.className = cls;
    return node;
  };

  // Search and filters, kept in the address so that a view can be shared
  function filter() {
    const want = Object.fromEntries(fields.map((name) => [name, $(name).value.trim()]));
    const words = want.q.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const item of index) {
      const cell = !(want.backend || want.state || want.cause) || item.cells.some((c) =>
        (!want.backend || c.backend === want.backend) && (!want.state || c.state === want.state) &&
        (!want.cause || c.cause === want.cause));
      const visible = cell && (!want.status || item.status === want.status) && words.every((word) => item.text.includes(word));
      item.row.hidden = !visible;
      const detail = item.row.nextElementSibling;
      if (detail && detail.classList.contains("detail")) detail.hidden = !visible;
      if (visible) shown += 1;
    }
    $("shown").textContent = `${shown} of ${all.length} hosts shown`;
    $("none").hidden = shown > 0;
    for (const tile of document.querySelectorAll("button.tile")) {
      tile.setAttribute("aria-pressed", String(tile.dataset.status === want.status));
    }
    const set = fields.filter((name) => want[name]).map((name) => `${name}=${encodeURIComponent(want[name])}`);
    history.replaceState(null, "", set.length ? `#${set.join("&")}` : location.pathname + location.search);
  }
  for (const part of location.hash.slice(1).split("&")) {
    const [name, value] = part.split("=");
    if (value !== undefined && fields.includes(name)) {
      try { $(name).value = decodeURIComponent(value); } catch (error) { if (!(error instanceof URIError)) throw error; }
    }
  }
  for (const name of fields) for (const kind of ["input", "change"]) $(name).addEventListener(kind, filter);
  $("clear").addEventListener("click", () => { for (const name of fields) $(name).value = ""; filter(); $("q").focus(); });
  for (const button of document.querySelectorAll(".show")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      for (const name of fields) $(name).value = "";
      for (const name of ["backend", "cause", "q"]) if (button.dataset[name]) $(name).value = button.dataset[name];
      filter();
      $("matrix").scrollIntoView();
      $("q").focus({ preventScroll: true });
    });
  }
  for (const tile of document.querySelectorAll("button.tile")) {
    tile.addEventListener("click", () => {
      $("status").value = $("status").value === tile.dataset.status ? "" : tile.dataset.status;
      filter();
      $("matrix").scrollIntoView();
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      $("q").focus();
    }
  });

  // Sorting
  const order = new Intl.Collator("en", { numeric: true });
  for (const button of document.querySelectorAll(".sort")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = all.map((row, place) => ({ row, place, key: row.cells[column].dataset.sort, detail: row.nextElementSibling }));
      rows.sort((a, b) => (down ? -1 : 1) * order.compare(a.key, b.key) || a.place - b.place);
      for (const { row, detail } of rows) {
        body.append(row);
        if (detail && detail.classList.contains("detail")) body.append(detail);
      }
    });
  }

  // Details of a host
  function pairs(list) {
    const dl = el("dl", null, "pair");
    for (const [name, value] of list) {
      if (value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length)) continue;
      dl.append(el("dt", name), el("dd", Array.isArray(value) ? value.join(", ") : String(value)));
    }
    return dl;
  }
  const tones = data.tones;
  function panel(title, state) {
    const box = el("section", null, "panel");
    const head = el("h3", title);
    if (state) head.append(" ", el("span", state.replace(/_/g, " "), `pill ${tones[state] || "idle"}`));
    box.append(head);
    return box;
  }
  function describe(host) {
    const entry = data.hosts[host];
    const grid = el("div", null, "grid");
    const add = (box, ...parts) => { box.append(...parts); grid.append(box); };
    const hw = entry.hardware;
    if (!entry.reached) {
      add(panel("Not reached"), el("p", "Unreachable, or its probe failed. The run's output says which."));
      return grid;
    }
    if (entry.failure) {
      const box = panel(entry.failure.task, "failed");
      box.classList.add("wide");
      add(box, el("pre", entry.failure.message));
    }
    for (const [name, item] of Object.entries(entry.instances)) {
      if (!item.service && !item.rejected.length) continue;
      const box = panel(`Instance ${name}`, item.rejected.length ? "refused" : item.state);
      add(box, pairs([["revision", item.revision], ["last good", item.last_good], ["plan", item.plan],
        ["drift", item.drift === null ? null : item.drift ? "the unit differs from the plan" : "none"]]));
      for (const r of item.rejected) {
        box.append(pairs([["refused", r.code], ["why", r.message], ["do", r.suggestion], ["about", r.flag || r.variable]]));
      }
      if (item.cause) {
        box.append(pairs([["cause", item.cause.code], ["why", item.cause.message], ["do", item.cause.mend]]));
        if (item.cause.lines && item.cause.lines.length) {
          box.classList.add("wide");
          box.append(el("pre", item.cause.lines.join("\n")));
        }
      }
    }
    for (const [path, venv] of Object.entries(entry.venvs)) {
      for (const [name, backend] of Object.entries(venv.backends)) {
        const after = backend.after, before = backend.before, known = data.causes[after.code] || {};
        const list = [["before", before.state !== after.state ? before.state : null],
          ["cause", after.code && (known.text ? `${after.code}: ${known.text}` : after.code)], ["seen", after.message],
          ["evidence", after.level], ["wanted for", backend.wanted.length ? backend.wanted : "nothing"],
          ["installed", after.distributions.map((d) => `${d.name} ${d.version}`)]];
        if (backend.remedy) list.push([after.state === "ok" ? "was mended by" : "remedy", backend.remedy.summary]);
        else if (after.state !== "ok") list.push(["mend", known.mend]);
        for (const [use, u] of Object.entries(after.uses)) {
          if (u.state !== after.state) list.push([use, `${u.state}${u.code ? ` (${u.code})` : ""}`]);
        }
        add(panel(name, after.state), pairs(list));
      }
      add(panel("Venv", venv.state === "ok" ? null : venv.state), pairs([["path", path], ["why", venv.message],
        ["Python", venv.python], ["torch", venv.torch], ["SGLang", venv.sglang], ["owner", venv.owner]]));
    }
    if (hw.gpu_state || hw.gpu) {
      add(panel("Hardware"), pairs([["GPUs", hw.gpu ? `${hw.gpus} × ${hw.gpu}` : hw.gpu_state], ["why", hw.gpu_message],
        ["lost", hw.gpus_lost], ["driver", hw.driver], ["its CUDA", hw.cuda_driver], ["topology", hw.fabric],
        ["no link", hw.bad_gpus], ["RDMA devices", hw.rdma_devices]]));
    }
    return grid;
  }
  body.addEventListener("click", (event) => {
    const button = event.target.closest(".open");
    if (!button) return;
    const row = button.closest("tr");
    const next = row.nextElementSibling;
    if (next && next.classList.contains("detail")) {
      next.remove();
      button.setAttribute("aria-expanded", "false");
      return;
    }
    const detail = el("tr", null, "detail");
    const cell = el("td");
    cell.colSpan = row.cells.length;
    cell.append(describe(row.dataset.host));
    detail.append(cell);
    row.after(detail);
    button.setAttribute("aria-expanded", "true");
  });

  // Light and dark: the system's, until the reader says otherwise
  $("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  $("theme").hidden = false;
  document.querySelector(".tools").hidden = false;
  filter();
})();
