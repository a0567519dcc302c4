// A box above every long table: rows without all of its words are hidden.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 25) continue;
    const box = document.createElement("input");
    box.type = "search";
    box.className = "filter";
    box.placeholder = `filter ${rows.length} rows`;
    box.setAttribute("aria-label", "Filter the rows of the table below");
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
    (table.closest(".table-wrapper") ?? table).before(box);
  }
});
