// A long table scrolls in a window of its own, under a box: rows without all of its words are hidden.
// The sections of a page that has many of them open on a click, or by a link to them.
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
    const window = table.closest(".table-wrapper") ?? table;
    window.classList.add("long");
    window.before(box);
  }
  const headings = document.querySelectorAll("article h2");
  if (headings.length < 20) return;
  for (const heading of headings) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    while (heading.nextSibling) details.append(heading.nextSibling);
    heading.before(details);
    details.prepend(summary);
    summary.append(heading);
  }
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target?.querySelector("details") ?? target?.closest("section")?.querySelector("details");
    if (!details) return;
    details.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();
});
