"""Tells chat, code and mathematics apart, from the messages of a request.

A linear model over features that a person can read: cues (patterns that look alike in every language: a code fence, an
equation, a sum of money) and concepts (lists of words in several languages that mean one thing, such as "function" or
"how many"). Every feature of a text votes for each workload with its weight; the largest sum wins, and
``Classification.evidence`` names the votes that decided. Single words are no features: what they would learn from
training prompts is the style of those prompts.

The weights are data (``classifier_weights.json``), made by ``angelspec.data.classifier_training``. Nothing but
the standard library is used, and a text is read only in part when it is long, so that a call takes well under a
millisecond.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from angelspec.core.workloads import WORKLOADS, Workload

WEIGHTS_FILE = Path(__file__).with_name("classifier_weights.json")
_HEAD, _TAIL = 1200, 600
"""Characters that are read at a message's beginning and end."""
_MOST_MESSAGES = 4
"""User messages that are read, the latest first; each weighs less than the one after it."""
_FADE = 0.6
_LONGEST_WORD = 24
"""Letters of a word that are compared with the beginnings of words."""

# ------------------------------------------------------------------------------------------------- features


def _compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    return {name: re.compile(pattern, re.MULTILINE) for name, pattern in patterns.items()}


# No pattern may scan far from each place where it can begin: a text of one kind of character must stay quick.
_CODE_CUES = _compiled(
    {
        "code fence": r"```",
        "inline code": r"`[^`\n]{1,80}`",
        "function call": r"\b[A-Za-z_]\w{1,40}\((?!s\))",
        "identifier": r"\b[a-z]+_[a-z_]+\b|\b[a-z]+[A-Z][a-zA-Z]+\b",
        "error name": r"\b[A-Z][a-z]\w{0,40}(?:Error|Exception)\b",
        "file name": r"\b[\w-]{1,40}\.(?:py|js|ts|java|cpp|cc|c|h|cs|go|rs|rb|php|html|css|json|ya?ml|csv|sql|sh|md)\b",
    }
)
_PROSE_CUES = _compiled(
    {
        "latex": r"\\(?:[a-zA-Z]{2,}|[\[(])|\$[^$\n]{1,60}\$",
        "equation": r"[\dxyz)²]\s?[=+*/^×÷·≤≥<>−]\s?-?[\dxyz(√\\]|[a-z]\([a-z]\)\s?="
        r"|√|π|∫|∑|²|³|\b\d+\s?[-–]\s?\d+\s?=",
        "number": r"\d+(?:[.,]\d+)*",
        "date or time": r"\b(?:19|20)\d\d\b|\d:\d\d|\d\s?[ap]\.?m\b"
        r"|\d(?:st|nd|rd|th)?\.?\s(?:of\s)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)|(?:January|February|March|April|June|July|August|September|October|November|December)\s\d",
        "money": r"[$€£¥₹₽₩]\s?\d|\d\s?(?:[$€£¥₹₽₩元円원块]|dollars?|cents?|euros?|Euro|pounds?|zł|kronor|руб|lira)",
        "percent": r"\d\s?(?:[%％]|percent|Prozent|pour ?cent|por ciento|per cento|por cento|procent)",
        "fraction": r"\d\s?/\s?\d",
        "measure": r"\d\s?(?:(?:km|m|cm|mm|kg|g|lb|l|ml|mph|miles?|feet|inches|meters?|metres?|hours?"
        r"|lit(?:er|re)s?|litros?"
        r"|minutes?|days?|weeks?|Stunden|Minuten|Tage|heures?|jours?|horas?|días?|minut[io]s?|ore|giorni|godzin|minut"
        r"|час\w{0,3}|минут\w?|км|кг|см|saat|dakika|timmar|minuter|uur)(?![^\W\d_\u3040-\u9fff])|千米|公里|厘米|小时|分钟"
        r"|時間|分間|メートル|キロ|시간|분)",
    }
)
_LIST_MARKER = re.compile(r"^[ \t]*\d{1,2}[.)][ \t]|\(\d\)[ \t]", re.MULTILINE)
_CODE_LINE = re.compile(
    r"^[ \t]*(?:(?:def|class|function|fn|func|public|private|protected|static|import|from|#include|using|const|let|var"
    r"|struct|interface|return|assert|SELECT|INSERT|CREATE|UPDATE|DELETE|package|namespace|template)\b.{0,80}"
    r"[(){};:=<>\"'*]|(?:if|elif|else|for|while|try|except|with)\b.{0,80}:[ \t]*$|return\b|>>>|//|/\*|\*/|#!|@\w"
    r"|</?\w{1,20}[^>]{0,80}>)|[;{}][ \t]*$|==|!=|=>|->|&&|\|\||\+=|::"
)

_CONCEPTS: dict[str, str] = {
    # Words are matched whole, or as a beginning where they end in *. Anywhere: words of Chinese, Japanese and Korean,
    # and phrases (an underscore is a space).
    "programming language": """python* javascri* typescri* java javie c++ c# golang sql bash bashu html css php kotlin*
        perl haskell matlab numpy pandas django nodejs jquery pytorch pytest tensorflow mysql postgres* sqlite mongodb
        docker* kubernetes git github powershell json xml yaml csv api http vba makefile dockerfile crontab regex*
        regexp* in_go in_c in_r in_rust in_swift in_scala in_ruby in_lua in_react in_excel in_fortran c_program
        c_function c_code go_function go_program go_code rust_function rust_program rust_code ruby_method ruby_function
        ruby_code swift_function swift_code scala_function react_component flask_route flask_app linux_command
        shell_script node_js regulären_ausdruck regulärer_ausdruck expression_régulière expressions_régulières
        expresión_regular expressão_regular espressione_regolare regular_expression regular_expressions
        reguliere_expressie wyrażenie_regularne регулярное_выражение 正则 正規表現 정규식 파이썬 자바 питон*""",
    "programming task": """stdin stdout input output compile* runtime testcase* benchmark* leetcode codeforces atcoder
        commit rebase branch repository install package* library libraries framework server deploy* endpoint
        error traceback exit*""",
    "perhaps code": """class classes code codes program* script* table tables column* parameter* argument* stack queue
        list lists bug bugs pointer* loop loops string strings query queries""",
    "code noun": """function* method* array* variable* algorithm* compiler debug* exception* recursion recursive*
        boolean int ints dictionary dict dicts tuple* iterator* unittest* implement* refactor* syntax constructor*
        snippet* codebase backend frontend hashmap substring* palindrom* dataframe* database* docstring* subclass*
        lambda async await decorator* namespace* callback* mutex thread* goroutine* горутин* null parse* parser*
        funktion* methode* klasse* schleife* zeichenkette* variablen quelltext quellcode code programm* skript*
        algorithmus algorithmen fehler datenbank* abfrage* rückgabe* implementier* liste listen
        fonction* méthode* classe* boucle* chaîne* tableau programme* algorithme* requête* développ* renvoi* liste*
        función funciones método* clase* bucle* cadena* arreglo* programa* algoritmo* consulta* código implement*
        devuelv* lista* diccionario*
        funzione funzioni metodo* ciclo stringa stringhe codice algoritmo script restituis* lista
        função funções laço código algoritmo retorn* string
        functie* methode* lus tekenreeks* programma* databank
        funkcj* metod* pętl* łańcuch* program* algorytm* kod zwrac* tablic*
        функци* метод* класс* цикл* строк* массив* код* программ* алгоритм* скрипт* запрос* возвращ* список
        fonksiyon* döngü* dizi* kod* algoritma* funktion* metod* sträng* slinga
        函数 代码 程序 循环 数组 字符串 算法 脚本 变量 编程 接口 查询 数据库 列表
        関数 コード プログラム ループ 配列 文字列 アルゴリズム スクリプト 変数 クエリ 実装
        함수 메서드 코드 프로그램 반복문 배열 문자열 알고리즘 스크립트 변수 쿼리 구현
        دالة كود برنامج خوارزمية مصفوفة""",
    "how many": """many much total altogether left remain* each per twice half double sum difference average
        viel viele vielen insgesamt übrig bleiben jeder jede jedes pro doppelt hälfte summe differenz durchschnitt*
        combien total reste* chaque moitié double somme différence moyenne
        cuánto cuánta cuántos cuántas total queda* cada mitad doble suma diferencia promedio media
        quanto quanta quanti quante totale rimang* resta* ogni ciascun* metà doppio somma differenza
        quantos quantas restam sobra* metade dobro soma diferença média
        hoeveel totaal over elke helft dubbel* som verschil gemiddelde
        ile razem zostanie zostało każdy każda połow* suma różnic* średni*
        сколько всего осталось каждый каждая каждого половин* сумм* разност* средн*
        kaç toplam kaldı her yarısı hur många totalt kvar varje
        多少 几个 一共 总共 剩下 每个 每 一半 两倍 平均 总和
        いくつ 何個 いくら 合計 残り 半分 平均 何人 何時間 何本 何枚 何分 何円 何km 何メートル 合わせて 距離 時速
        몇 모두 합계 남은 평균 절반
        كم""",
    "calculate": """calculate compute solve evaluate simplify factor* find prove differentiate integrate determine
        berechne* löse lösen bestimme ermittle vereinfache beweise rechne
        calcule* calculer résous résoudre résolvez détermine* simplifie* démontre*
        calcula* calcular resuelve resolver halla determina* simplifica* demuestra
        calcola* risolvi risolvere trova determina semplifica dimostra
        calcule resolva determine simplifique
        bereken los vereenvoudig bepaal bewijs
        oblicz rozwiąż wyznacz uprość udowodnij
        вычисли* реши* найди* найдите упрости* докажи* определи*
        hesapla* çöz* bul beräkna lös bestäm
        计算 求解 求 解方程 化简 证明
        計算 解いて 求め 求めよ 証明 方程式
        계산 구하 풀어 구하시오 증명
        احسب""",
    "mathematics noun": """equation* numbers integer* fraction* percent* probabilit* triangle* circle* square rectangle*
        angle* area perimeter volume radius diameter derivative* integral* polynomial* matrix matrices prime primes
        root roots divisor* remainder* multiple* ratio* slope graph function vector* theorem* logarithm* sine cosine
        geometric arithmetic sequence* digit digits decimal* exponent* quadratic linear inequalit* hypotenuse
        permutation*
        gleichung* zahl zahlen bruch brüche prozent wahrscheinlichkeit* dreieck* kreis* quadrat* rechteck* winkel*
        fläche flächeninhalt umfang volumen radius durchmesser ableitung* integral* primzahl* wurzel* teiler rest
        équation* nombre* fraction* probabilité* cercle* carré* rectangle* angle* aire périmètre dérivée* intégrale*
        racine* reste
        ecuación ecuaciones número* fracción probabilidad* triángulo* círculo* cuadrado* rectángulo* ángulo* área
        perímetro derivada* integral* primo primos raíz raíces
        equazion* numer* frazion* probabilità triangol* cerchi* quadrat* rettangol* angol* perimetro derivata radice
        equação equações fração probabilidade triângulo* retângulo* derivada raiz
        vergelijking* getal getallen breuk* kans driehoek* cirkel* rechthoek* hoek* oppervlakte omtrek afgeleide
        równani* liczb* ułam* prawdopodobieństw* trójkąt* okręg* prostokąt* pole obwód pochodn*
        уравнени* числ* дроб* вероятност* треугольник* окружност* прямоугольник* площад* периметр* производн* корен*
        denklem* sayı* kesir olasılık üçgen* ekvation* tal bråk sannolikhet*
        方程 数字 分数 概率 三角形 圆 正方形 长方形 面积 周长 导数 积分 质数 百分之
        方程式 分数 確率 三角形 円 正方形 長方形 面積 周囲 微分 積分 素数 割合
        방정식 분수 확률 삼각형 원 정사각형 직사각형 넓이 둘레 미분 적분 소수
        معادلة عدد مثلث""",
    "prose noun": """extract* title* categor* listing* product products brand* company business passage* keyword*
        sentence* abstract description* resume interview* customer* audience tone style story stories poem* email
        letter essay* article* blog* recipe* speech* summary summar* paragraph*
        review* advice tips translate* translation rewrite* edit* joke* song lyrics dialogue conversation* invitation
        message* tweet* slogan* caption* tagline* headline* itinerary plan brainstorm* pros cons opinion* history
        geschichte* gedicht* brief e-mail mail aufsatz artikel rezept* rede zusammenfass* absatz ratschl* tipps
        übersetz* witz* lied einladung nachricht*
        histoire* poème* lettre* courriel essai article* recette* discours résum* paragraphe* conseil* tradui*
        blague* chanson* invitation
        historia* cuento* poema* carta correo ensayo artículo* receta* discurso* resum* párrafo* consejo* traduc*
        chiste* canción
        storia* racconto poesia lettera articolo ricetta* discorso riassu* paragrafo consigl* traduc* barzelletta
        canzone
        história* conto poema carta artigo receita* discurso resum* parágrafo conselho* traduz* piada
        verhaal gedicht brief artikel recept* samenvat* alinea advies vertaal* grap uitnodiging
        opowiad* wiersz* artykuł* przepis* streszcz* akapit* rada przetłumacz* żart
        рассказ* стих* письмо письма эссе стать* рецепт* резюме абзац* совет* переве* шутк*
        hikaye* şiir* mektup makale tarif* özet* çevir* berättelse dikt brev artikel recept sammanfatta* översätt*
        故事 诗 信 邮件 文章 食谱 菜谱 演讲 总结 段落 建议 翻译 笑话 介绍 推荐
        物語 詩 手紙 メール 記事 レシピ スピーチ 要約 段落 アドバイス 翻訳 おすすめ 紹介
        이야기 시 편지 이메일 기사 요리법 레시피 연설 요약 조언 번역 추천 소개
        قصة قصيدة رسالة مقال وصفة ترجم""",
    "explain": """explain describe why what who difference between mean meaning suggest recommend compare discuss
        should would think feel could help me my your
        erkläre erklär beschreibe warum was wer unterschied bedeutet empfiehl vergleiche mir mein meine
        explique* décri* pourquoi que qui différence signifie recommand* compare* moi mon ma
        explica* describe* porqué qué quién diferencia significa recomienda* compara* mi mis
        spiega* descrivi perché cosa chi differenza significa consiglia* mio mia
        explique descreva porquê diferença significa recomend* meu minha
        leg uitleg beschrijf waarom wat wie verschil betekent mijn
        wyjaśnij opisz dlaczego co kto różnica znaczy poleć mój moja
        объясни* опиши* почему что кто разниц* значит посоветуй* мой моя мне
        açıkla anlat neden nedir förklara beskriv varför vad
        解释 描述 为什么 什么 谁 区别 意思 如何 怎么
        説明 なぜ 何 誰 違い 意味 どう 教えて
        설명 왜 무엇 누구 차이 의미 어떻게 알려
        اشرح لماذا""",
}
_WORD = re.compile(r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+(?:\+\+|#)?")
_DENSE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Scripts that put no spaces between words, or join endings to them: their words are matched anywhere."""
_MOST_HITS = 5
"""More hits of a cue, or words of a concept, say no more."""


@cache
def _lexicon() -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]], tuple[tuple[str, str], ...]]:
    """Concepts by whole word, by beginning of a word, and (word, concept) of what is matched anywhere."""
    whole: dict[str, list[str]] = {}
    beginning: dict[str, list[str]] = {}
    anywhere = []
    for concept, words in _CONCEPTS.items():
        for word in dict.fromkeys(words.split()):
            if _DENSE.match(word):
                anywhere.append((word, concept))
            elif "_" in word:
                anywhere.append((f" {word.replace('_', ' ')} ", concept))
            elif word.endswith("*"):
                beginning.setdefault(word[:-1], []).append(concept)
            else:
                whole.setdefault(word, []).append(concept)
    fixed = {word: tuple(concepts) for word, concepts in whole.items()}
    return fixed, {word: tuple(concepts) for word, concepts in beginning.items()}, tuple(anywhere)


@cache
def _shortest() -> int:
    return min(map(len, _lexicon()[1]))


SPEAKS_FOR: dict[str, Workload] = {
    "code lines": "code",
    **{f"cue {name}": "code" for name in _CODE_CUES},
    **{f"cue {name}": "math" for name in _PROSE_CUES},
    **{f"concept {name}": "code" for name in ("programming language", "programming task", "code noun", "perhaps code")},
    **{f"concept {name}": "math" for name in ("how many", "calculate", "mathematics noun")},
    **{f"concept {name}": "chat" for name in ("prose noun", "explain")},
    "cue date or time": "chat",
    "numbers, and how many": "math",
}
"""The workload that a feature may vote for: training may find it weak, but not that it means something else."""


def features(text: str) -> dict[str, float]:
    """What is seen in one text, by the name of the feature.

    Numbers and words inside code say nothing about the question, so all but the cues of code are looked for in prose.
    """
    text = text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    prose, num_code_lines = _without_code(text)
    found: dict[str, float] = {}
    if num_code_lines:
        found["code lines"] = math.log2(1 + min(num_code_lines, _MOST_HITS))
    for cues, where in ((_CODE_CUES, text), (_PROSE_CUES, prose)):
        for name, pattern in cues.items():
            if hits := len(pattern.findall(where)):
                found[f"cue {name}"] = math.log2(1 + min(hits, _MOST_HITS))
    counts = _concepts(prose.lower())
    for concept, count in counts.items():
        found[f"concept {concept}"] = math.log2(1 + min(count, _MOST_HITS))
    if "cue number" in found and "how many" in counts:
        found["numbers, and how many"] = 1.0
    return found


def _without_code(text: str) -> tuple[str, int]:
    """The lines that are prose, and how many are not: those in a fence, and those that look like code."""
    prose, num_code, fenced, after_code = [], 0, False, False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            prose.append(line.strip("` \t"))  # the language of a fence is a word like others
            continue
        after_code = fenced or bool(_CODE_LINE.search(line)) or (after_code and line.startswith(("  ", "\t", " *")))
        if after_code:
            num_code += 1
        else:
            prose.append(line)
    return _LIST_MARKER.sub("", "\n".join(prose)), num_code


def _concepts(prose: str) -> dict[str, int]:
    """How many different words of each concept occur in a lower-case text."""
    whole, beginning, anywhere = _lexicon()
    counts: dict[str, int] = {}
    words = _WORD.findall(prose)
    line = f" {' '.join(words)} "
    for word in set(words):
        concepts = set(whole.get(word, ()))
        for end in range(_shortest(), min(len(word), _LONGEST_WORD) + 1):
            concepts.update(beginning.get(word[:end], ()))
        for concept in concepts:
            counts[concept] = counts.get(concept, 0) + 1
    dense = bool(_DENSE.search(prose))
    for phrase, concept in anywhere:
        if phrase in (line if phrase[0] == " " else prose if dense else ""):
            counts[concept] = counts.get(concept, 0) + 1
    return counts


# ----------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Classification:
    """What a request was taken for, and why."""

    workload: Workload
    probability: float
    """Of that workload, by the model."""
    evidence: tuple[tuple[str, float], ...]
    """The features that spoke most for it against the runner-up, with their votes (negative: against it)."""

    def __str__(self) -> str:
        votes = ", ".join(f"{name} {vote:+.1f}" for name, vote in self.evidence)
        return f"{self.workload} ({self.probability:.0%}: {votes or 'nothing telling'})"


@dataclass(frozen=True)
class ClassifierWeights:
    """A linear model: a vote per workload for every feature."""

    bias: Mapping[Workload, float]
    votes: Mapping[str, tuple[float, ...]]
    """By feature, in the order of ``WORKLOADS``."""

    @classmethod
    def read(cls, path: Path) -> ClassifierWeights:
        """From a JSON file of ``core/classifier_weights.json``'s form."""
        content = json.loads(path.read_text(encoding="utf-8"))
        order = [content["workloads"].index(workload) for workload in WORKLOADS]
        votes = {name: tuple(values[i] for i in order) for name, values in content["votes"].items()}
        return cls({workload: content["bias"][i] for workload, i in zip(WORKLOADS, order, strict=True)}, votes)


@cache
def shipped_weights() -> ClassifierWeights:
    """The weights in the package."""
    return ClassifierWeights.read(WEIGHTS_FILE)


def classify_text(*texts: str, weights: ClassifierWeights | None = None, num_evidence: int = 5) -> Classification:
    """Classify what a user wrote.

    Args:
        texts: the user's messages, the latest last.
        weights: None: those of the package.
        num_evidence: features to name.
    """
    weights = shipped_weights() if weights is None else weights
    scores = [weights.bias[workload] for workload in WORKLOADS]
    cast: dict[str, list[float]] = {}
    for age, text in enumerate(reversed(texts[-_MOST_MESSAGES:])):
        for name, value in features(text).items():
            if (votes := weights.votes.get(name)) is not None:
                given = cast.setdefault(name, [0.0] * len(WORKLOADS))
                for i, vote in enumerate(votes):
                    given[i] += vote * value * _FADE**age
    for given in cast.values():
        scores = [score + vote for score, vote in zip(scores, given, strict=True)]
    first, second = sorted(range(len(WORKLOADS)), key=lambda i: (-scores[i], i))[:2]
    margins = sorted(((given[first] - given[second], name) for name, given in cast.items()), key=lambda m: -abs(m[0]))
    total = sum(math.exp(score - scores[first]) for score in scores)
    return Classification(
        WORKLOADS[first],
        1 / total,
        tuple((name, round(margin, 2)) for margin, name in margins[:num_evidence] if abs(margin) >= 0.05),
    )


def classify(messages: Sequence[Mapping[str, Any]], *, weights: ClassifierWeights | None = None) -> Classification:
    """Classify a chat request by what its user wrote; other roles are not read.

    Args:
        messages: of the OpenAI form: ``role`` and ``content``, the latter a text or a list of parts.
        weights: None: those of the package.
    """
    texts = [_text(message.get("content")) for message in messages if message.get("role") == "user"]
    return classify_text(*(text for text in texts if text), weights=weights)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""
