"""The project scope of SQL statements: a statement that could reach rows of another project is rejected.

A row's project is in a column of the row, or is the project of the row's run or event. `Scope` adds a condition on the
project to statements. Before a statement is sent, `guard` rejects a statement without this condition and, on a
connection of one project, a statement that names another project. The exception is a connection that was opened, with a
reason, for rows of every project. The verdict is cached with the compiled statement, so a repeated statement costs one
look-up.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
    BooleanClauseList,
    ClauseElement,
    Column,
    ColumnClause,
    ColumnElement,
    Delete,
    Engine,
    Executable,
    FromClause,
    Insert,
    Join,
    Select,
    SelectBase,
    Table,
    TableClause,
    TextClause,
    TextualSelect,
    UnaryExpression,
    Update,
    delete,
    event,
    exists,
    select,
    update,
)
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import Grouping
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import AliasedReturnsRows

from posttrain.store.schema import attempts, events, grants, leaves, metadata, payloads, runs, stages, unsealed, watches

ACROSS = "across_projects"  # the execution option: why statements may reach rows of every project
OF = "of_project"  # the execution option: the project that statements must name
PROJECT = "project"
CHILDREN: Mapping[str, tuple[str, Table]] = {  # table without a project column → its foreign key column and its parent
    **{table.name: ("run_id", runs) for table in (stages, attempts, watches, grants)},
    **{table.name: ("event", events) for table in (leaves, payloads, unsealed)},
}
OWN = frozenset(name for name, table in metadata.tables.items() if PROJECT in table.c)
Executes = TypeVar("Executes", bound=Executable)
_VIEW = "telling"  # the view through which `store.journal` writes events on SQLite
_VERDICT = "posttrain_unscoped"  # attribute of a compiled statement
_WORDS = re.compile(r"[a-z_]+")
_WRITTEN = re.compile(r"project(_m\d+)?")  # names of parameters with the project of a written row
_OF_THE_SAME = re.compile(r"on conflict \(project,|where (\w+)\.run_id = excluded\.run_id")  # same project on conflict
_OF_PROJECT = re.compile(r"(?<![:\w])project\s*=\s*:project\b|\(project\b[^)]*\)\s*VALUES\s*\(:project\b")


def of_project(table: Table, project: str | BindParameter[str]) -> ColumnElement[bool]:
    """Return the condition for rows of a table that are in a project."""
    if table.name in OWN:
        return table.c[PROJECT] == project
    column, above = CHILDREN[table.name]
    return exists().where(above.c.id == table.c[column], above.c[PROJECT] == project)


def across(statement: Executes, why: str) -> Executes:
    """Return the statement with the permission, and its reason, to reach rows of every project."""
    return statement.execution_options(**{ACROSS: why})


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows of one project."""

    project: str

    def select(self, table: Table, *columns: Any) -> Select[Any]:
        """Select these columns, or all, of the project's rows of a table."""
        return select(*(columns or (table,))).where(of_project(table, self.project))

    def update(self, table: Table) -> Update:
        """Update rows of the project."""
        return update(table).where(of_project(table, self.project))

    def delete(self, table: Table) -> Delete:
        """Delete rows of the project."""
        return delete(table).where(of_project(table, self.project))


class UnscopedStatementError(RuntimeError):
    """A statement over rows of a project names no project, or not that of its connection; a bug in Posttrain."""


def guard(engine: Engine) -> None:
    """Reject statements of this engine that lack a required project, or name a project other than their connection's.

    Raises:
        UnscopedStatementError: raised by the execution of such a statement, which does not reach the database.
    """
    event.listen(engine, "before_cursor_execute", _refuse)


def _refuse(_: Any, __: Any, sent: str, ___: Any, context: Any, ____: bool) -> None:
    if context.execution_options.get(ACROSS):
        return
    compiled = context.compiled
    if compiled is None:
        found, names = _named(sent), frozenset[str]()
    else:
        kept = vars(compiled)
        if _VERDICT not in kept:
            kept[_VERDICT] = unscoped(compiled.statement), _projects(compiled)
        found, names = kept[_VERDICT]
    if found:
        raise UnscopedStatementError(f"a statement reads or changes rows of {found} in every project: {sent}")
    mine = context.execution_options.get(OF)
    for given in context.compiled_parameters if mine and names else ():
        for name, value in given.items():  # in an `IN`, each value has the parameter's name and a number
            if value != mine and (name in names or name.rpartition("_")[0] in names):
                raise UnscopedStatementError(f"a statement of project {mine} names {value!r}: {sent}")


def _projects(compiled: Any) -> frozenset[str]:
    """Return the names of the parameters that are projects, in a statement's conditions and in the rows it writes."""
    found = {
        compiled.bind_names.get(right)
        for part in visitors.iterate(compiled.statement)
        for left, right in _compared(part)
        if left.name == PROJECT and isinstance(right, BindParameter)
    }
    if isinstance(compiled.statement, Insert | Update | TextClause):
        found |= {name for name in compiled.binds if _WRITTEN.fullmatch(name)}
        found |= {one.key for one in _written(compiled.statement) if isinstance(one, BindParameter)}
    return frozenset(found - {None})


def _written(statement: Any) -> Iterator[Any]:
    """Yield the expressions, other than plain values, that a statement writes as the project of a row."""
    values = getattr(statement, "_values", None) or {}
    yield from (value for column, value in values.items() if getattr(column, "name", column) == PROJECT)


def _refused_write(statement: Insert | Update) -> str:
    """Return the table of a write that may reach any project; empty for every other write.

    Such a write inserts the rows of a query, overwrites existing rows, or computes the project.
    """
    table = str(getattr(statement.table, "name", statement.table))
    from_query = isinstance(statement, Insert) and statement.select is not None
    conflict = getattr(statement, "_post_values_clause", None)
    target = getattr(conflict, "inferred_target_elements", None) or ()
    same = any(getattr(one, "name", one) == PROJECT for one in target)  # conflicts only with rows of the same project
    over = hasattr(conflict, "update_values_to_set") and not same
    computed = any(not isinstance(one, BindParameter) for one in _written(statement))
    return table if (table in OWN or table in CHILDREN) and (from_query or over or computed) else ""


@functools.lru_cache(1000)
def _named(sent: str) -> str:
    """Return the first project table that plain SQL names, unless the SQL only adds rows."""
    words = _WORDS.findall(sent.lower())
    over = "update" in words and not _OF_THE_SAME.search(sent.lower())
    if words[:1] in (["pragma"], ["insert"]) and not over and not {"select", "replace"} & set(words):
        return ""
    return next((word for word in words if word in OWN or word in CHILDREN or word == _VIEW), "")


def unscoped(statement: ClauseElement) -> str:
    """Return the name of a table whose rows a statement reaches in any project; empty if there is no such table."""
    written = _in_words(statement)
    if written:
        return written
    if isinstance(statement, Select):
        return _unscoped_select(statement, frozenset())
    if isinstance(statement, Insert | Update) and (refused := _refused_write(statement)):
        return refused
    if isinstance(statement, Update | Delete):
        conditions = list(_conjuncts(statement._where_criteria))
        values = getattr(statement, "_values", None) or {}
        froms = {statement.table, *_tables(conditions), *_tables(values.values())}
        about = [(one, froms) for one in conditions]
        _opened(froms, about)
        held = _held(froms, about)
        return _first(froms - held) or _nested(statement, held)
    return "" if isinstance(statement, TextClause) else _nested(statement, frozenset())


def _in_words(statement: ClauseElement) -> str:
    """Return the first project table named in a statement's raw SQL text, unless the text has a project condition."""
    for part in visitors.iterate(statement):
        found = ""
        part = part.element if isinstance(part, TextualSelect) else part
        if isinstance(part, TextClause):
            found = "" if _OF_PROJECT.search(part.text) else _named(part.text)
        elif isinstance(part, TableClause) and not isinstance(part, Table):
            found = _named(f"from {part.name}")
        elif isinstance(part, ColumnClause) and part.is_literal:
            found = _named(f"select {part.name}")
        if found:
            return found
    return ""


def _unscoped_select(statement: Select[Any], outer: frozenset[FromClause] | set[FromClause]) -> str:
    """Return `unscoped` for a SELECT inside other SELECTs, whose tables, `outer`, are limited to one project."""
    froms: set[FromClause] = set()
    conditions = [(one, froms) for one in _conjuncts(statement._where_criteria)]
    parts = statement.get_final_froms()
    for part in parts:
        _joined(part, froms, conditions)
    _opened(froms, conditions)
    shared = outer & set(parts)  # SQLAlchemy correlates whole parts of FROM, unless none would remain
    mine = froms if len(shared) == len(parts) else froms - shared
    held = _held(mine, conditions, froms - mine)
    return _first(mine - held) or _nested(statement, held | outer)


def _joined(part: FromClause, froms: set[FromClause], conditions: list[tuple[Any, set[FromClause]]]) -> None:
    """Add the parts of a FROM. The condition of an outer join does not restrict its left side."""
    if not isinstance(part, Join):
        froms.add(part)
        return
    right: set[FromClause] = set()
    _joined(part.left, froms, conditions)
    _joined(part.right, right, conditions)
    froms |= right
    about = set() if part.full else right if part.isouter else froms
    conditions += [(one, about) for one in _conjuncts([part.onclause])]


def _opened(froms: set[FromClause], conditions: list[tuple[Any, set[FromClause]]]) -> None:
    """Add the tables and conditions of EXISTS, which restricts the outer rows as a join does."""
    for one, _ in list(conditions):
        inner = _bare(one.element) if isinstance(one, UnaryExpression) and one.operator is operators.exists else None
        if isinstance(inner, Select) and not _aggregates(inner):
            for part in inner.get_final_froms():
                _joined(part, froms, conditions)
            conditions += [(within, froms) for within in _conjuncts(inner._where_criteria)]


def _aggregates(statement: Select[Any]) -> bool:
    """Return whether a query may return a row although no row meets its conditions."""
    computed = any(
        isinstance(part, FunctionElement) for one in statement._raw_columns for part in visitors.iterate(one)
    )
    return computed or bool(statement._group_by_clauses or statement._having_criteria)


def _held(
    froms: set[FromClause],
    conditions: list[tuple[Any, set[FromClause]]],
    given: Iterable[FromClause] = (),
) -> set[FromClause]:
    """Return the tables limited to one project: those compared with a value, or with a table that is so limited."""
    held = {one for one in froms if _key(one) is None} | set(given)
    grown = True
    while grown:
        grown = False
        for condition, about in conditions:
            for left, right in _compared(condition):
                table = getattr(left, "table", None)
                if table in held or table not in about:
                    continue
                chosen = isinstance(right, SelectBase) and _reads(right)  # a subquery, which is checked separately
                value = left.name == PROJECT and isinstance(right, BindParameter) and not right.literal_execute
                other = getattr(right, "table", None)
                named = left.name == _key(table) and (value or chosen or (other in held and _reads(other)))
                if named or (chosen and left.primary_key and len(left.table.primary_key) == 1):
                    held.add(table)
                    grown = True
    return held


def _reads(part: Any) -> bool:
    """Return whether a FROM or a query reads a project table."""
    while isinstance(part, AliasedReturnsRows):
        part = part.element
    if isinstance(part, Table):
        return bool(_key(part))
    inner = part.get_final_froms() if isinstance(part, Select) else part.get_children()
    return any(_reads(one) for one in inner if isinstance(one, FromClause | SelectBase))


def _key(part: Any) -> str | None:
    """Return the column that gives the rows' project; empty: no project; None: a subquery, checked separately."""
    while isinstance(part, AliasedReturnsRows):
        part = part.element
    if not isinstance(part, Table):
        return None
    return PROJECT if part.name in OWN else CHILDREN[part.name][0] if part.name in CHILDREN else ""


def _compared(condition: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(condition, BinaryExpression) and condition.operator in (operators.eq, operators.in_op):
        sides = [_bare(condition.left), _bare(condition.right)]
        yield from ((one, other) for one, other in (sides, sides[::-1]) if isinstance(one, Column))


def _bare(side: Any) -> Any:
    while isinstance(side, Grouping) or (hasattr(side, "element") and isinstance(side.element, SelectBase)):
        side = side.element
    return side


def _conjuncts(conditions: Iterable[Any]) -> Iterator[Any]:
    for one in conditions:
        if isinstance(one, BooleanClauseList) and one.operator is operators.and_:
            yield from _conjuncts(one.clauses)
        elif isinstance(one, Grouping):
            yield from _conjuncts([one.element])
        else:
            yield one


def _tables(conditions: Iterable[Any]) -> Iterator[FromClause]:
    waiting = list(conditions)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Column):
            yield one.table
        elif not isinstance(one, SelectBase):
            waiting += one.get_children()


def _nested(statement: ClauseElement, held: Iterable[FromClause]) -> str:
    """Return `unscoped` for the statements inside a statement."""
    waiting: list[tuple[Any, frozenset[FromClause]]] = [(one, frozenset(held)) for one in statement.get_children()]
    while waiting:
        one, outer = waiting.pop()
        if isinstance(one, Select):
            found = _unscoped_select(one, outer)
            if found:
                return found
        else:  # a subquery in FROM cannot reference the outer tables
            outer = frozenset() if isinstance(one, AliasedReturnsRows) else outer
            waiting += [(inner, outer) for inner in one.get_children()]
    return ""


def _first(froms: Iterable[FromClause]) -> str:
    return min((str(getattr(one, "name", one)) for one in froms if _key(one)), default="")
