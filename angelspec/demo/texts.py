"""The page's words: example prompts and explanations."""

from __future__ import annotations

from collections.abc import Mapping

from angelspec.core.workloads import Workload

EXAMPLES: Mapping[Workload, Mapping[str, str]] = {
    "chat": {
        "The history of paper": "Tell me about the history of paper in five sentences.",
        "Warum ist der Himmel blau?": "Erkläre einem Kind, warum der Himmel blau ist.",
        "Une lettre de remerciement": "Écris une courte lettre pour remercier un voisin de son aide.",
        "介绍长城": "请用三句话介绍一下长城。",
    },
    "code": {
        "Merge two lists in Python": "Write a Python function that merges two sorted lists, with a docstring and "
        "two examples.",
        "Contar vocales": "Escribe en JavaScript una función que cuente las vocales de un texto.",
        "判断回文": "用 Python 写一个判断回文字符串的函数，并附上测试。",
        "A query in SQL": "Write a SQL query that lists the ten customers with the highest total of orders in 2024.",
    },
    "math": {
        "Average speed": "A train travels 180 km in 2 hours and 15 minutes. What is its average speed? Show each step.",
        "Eine Gleichung": "Löse die Gleichung 3x + 7 = 2(x + 9) und erkläre jeden Schritt.",
        "La somme de 1 à 100": "Quelle est la somme des entiers de 1 à 100 ? Explique le calcul.",
        "仕事算": "12人で3日かかる仕事を9人で行うと何日かかりますか。順を追って説明してください。",
    },
}
"""What can be tried with one click, by workload and by what its button says, in several languages."""
HEADINGS: Mapping[Workload, str] = {"chat": "Chat", "code": "Code", "math": "Mathematics"}
MODE_NAMES = {"no-think": "Answer at once", "high-think": "Think first"}

TITLE = """# angelspec
One prompt, answered side by side: what each drafter adds to the same model, live."""
SEEDS_NOT_HEEDED = "Not heeded by {}: SGLang heeds seeds only with `--enable-deterministic-inference`, on a GPU."
SHARED = "Another visitor was answered on this machine meanwhile, so its speed is not what it has alone."
START = "Choose an example or write a prompt, then press Compare."

EXPLANATION = """## What is happening

A language model writes one token per pass, and each pass reads all of its weights. That reading takes most of the time,
so checking several tokens in one pass costs hardly more than writing one.

**A drafter guesses ahead.** It is a small network trained to foresee this one model. From the model's inner state it
proposes the next few tokens: MTP one after another, DFly and its relatives a whole block at once.

**The model checks the whole guess in one pass.** From the left, each proposal that the model would have written itself
is accepted; the first that differs is replaced by the model's own token. So every step yields at least one token and
often several, and the text is drawn just as it would be without a drafter. With temperature 0 all columns say the same,
up to rounding.

**D-cut spares what is unlikely.** With many requests at once, checking is no longer nearly free. D-cut verifies only
those proposals whose chance is worth their cost, across all requests of a step.

**Automatic chooses as it goes.** For each step, plain decoding or the drafter that promises the most tokens per second
for the request's workload and the present load.
"""
FIGURES = """### The figures of a column

- **tokens/s**: tokens behind the first piece of text, over the time since it
- **vs plain**: that speed over the plain column's, same prompt
- **first token**: from sending the request to the first text
- **accepted length**: tokens per verify step, the model's own included
- **kept ratio**: slots that were verified, of those drafted (what D-cut let through)

Columns of one machine run one after the other, since together they would slow each other down; each server then first
gets the prompt once with a single token of answer, so that no column pays for reading it alone. With *Together* in the
settings all columns start at once, and nothing is read before.
"""
MEASURED = "From the answers of this visit (plain columns draft nothing), and from load tests."
ACCEPTANCE_NOTE = (
    "Share of verify steps that accepted proposals 1 to k. Where D-cut left proposals unverified, they count as not "
    "accepted here."
)
KEPT_NOTE = "Verified over drafted slots, anchors counted, from the start of each answer."
NO_RESULTS = "No load test is at hand. Make one with angelspec bench serve, and start the page with --results FILE."
