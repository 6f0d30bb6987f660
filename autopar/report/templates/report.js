"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // Charts take text, grid and background from the page, so that they follow light, dark and paper.
  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const copy = structuredClone(layout);
    copy.font = Object.assign({}, copy.font, { color: colour("--text") });
    copy.hoverlabel = Object.assign({}, copy.hoverlabel, {
      bgcolor: colour("--surface"), bordercolor: colour("--rule"), font: { color: colour("--text") },
    });
    for (const axis of ["xaxis", "yaxis"]) {
      copy[axis] = Object.assign({}, copy[axis], {
        gridcolor: colour("--rule"), linecolor: colour("--rule"), tickcolor: colour("--rule"),
        tickfont: { color: colour(axis === "xaxis" ? "--muted" : "--text") },
      });
      if (copy[axis].title) copy[axis].title.font = { color: colour("--muted"), size: 12 };
    }
    return copy;
  }

  function draw() {
    const options = { displaylogo: false, responsive: true, displayModeBar: false };
    for (const [id, figure] of Object.entries(figures)) {
      const text = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
      for (const trace of figure.data) if (trace.error_x) trace.error_x.color = text;
      Plotly.react(id, figure.data, themed(figure.layout), options);
    }
  }

  draw();
  dark.addEventListener("change", draw);
  window.matchMedia("print").addEventListener("change", draw);

  const table = document.getElementById("parameter-table");
  const rows = Array.from(table.tBodies[0].rows);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const shown = document.getElementById("shown");

  document.getElementById("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => texts.get(row).includes(word));
      if (!row.hidden) count += 1;
    }
    shown.textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
  });

  const heads = Array.from(table.tHead.rows[0].cells);
  const collator = new Intl.Collator("en", { numeric: true });
  function value(row, column) {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  }
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Numbers are first wanted largest first, names from A on.
      const numeric = rows.length > 0 && typeof value(rows[0], column) === "number";
      const first = numeric ? "descending" : "ascending";
      const other = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((h) => h.setAttribute("aria-sort", h === head ? order : "none"));
      const sign = order === "ascending" ? 1 : -1;
      const sorted = rows.slice().sort((a, b) => {
        const x = value(a, column), y = value(b, column);
        return sign * (typeof x === "number" ? x - y : collator.compare(x, y));
      });
      table.tBodies[0].append(...sorted);
    });
  });
})();
