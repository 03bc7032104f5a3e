"""Whether a file that nobody named can be trusted: only we or root can have written it.

ssh (StrictModes) and git (safe.directory) require the same of files that they read without being
told to.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat

_WRITABLE = 0o022  # by the group, by everybody


def problem(path: str) -> str:
    """Return why a file cannot be trusted; "" if only we or root can write and replace it.

    The file and its directory are checked, and, for a link, its target's directory, too.
    """
    try:
        folder = os.path.dirname(path) or "."
        target = os.path.dirname(os.path.realpath(path)) or "."
        return (
            of_file(path)
            or _of_directory(folder, sticky=False)
            or _of_directory(target, sticky=os.path.islink(path))
        )
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"


def can_be_replaced(path: str) -> bool:
    """Return whether anybody but us or root can replace a directory.

    A user can if he can write to one of its parents, unless that is sticky and ours or root's.
    """
    return gives_way(os.path.dirname(os.path.realpath(path)))


def gives_way(folder: str) -> bool:
    """Return whether anybody but us or root can replace the content of a directory.

    Args:
        folder: a directory, without links in its path.
    """
    try:
        while folder != "/":
            if _of_directory(folder, sticky=True):
                return True
            folder = os.path.dirname(folder)
    except OSError:
        return True
    return False


def of_file(file: str | int) -> str:
    """Return why a file, given by path or open, cannot be trusted; "" if it can.

    Raises:
        OSError: the file cannot be examined.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        return "it is not a regular file"
    return _of(file, "it")


def _of_directory(path: str, *, sticky: bool) -> str:
    """Return why a directory cannot be trusted.

    Args:
        path: the directory's path.
        sticky: whether others may write there if they cannot replace our file. It is False where a
            name is looked up: others could create the missing file there.
    """
    status = os.stat(path)
    if sticky and status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.geteuid()):
        return ""
    return _of(path, "its directory")


def _of(file: str | int, noun: str) -> str:
    status = os.stat(file)
    if status.st_uid not in (0, os.geteuid()):
        return f"{noun} belongs to {user(status.st_uid)}"
    if status.st_mode & _WRITABLE and not (
        status.st_mode & _WRITABLE == 0o020 and _is_private_group(status) and not _names_users(file)
    ):
        return f"others can write {noun} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _names_users(file: str | int) -> bool:
    """Return whether there is an access control list, whose mask the group's bits show."""
    try:
        return bool(os.getxattr(file, "system.posix_acl_access"))
    except OSError:  # no list, or a file system without lists
        return False


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether only its owner is in a file's group, as on distributions with umask 002.

    Such a group is the user's own, has the user's name, lists nobody else and is nobody else's own.
    To check that, the table of all users is read, as sshd does on such distributions; a directory
    service may not list its users.
    """
    try:
        owner = pwd.getpwuid(status.st_uid)
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    own = group.gr_gid == owner.pw_gid and group.gr_name == owner.pw_name
    if not own or not set(group.gr_mem) <= {owner.pw_name}:
        return False
    members = {one.pw_uid for one in pwd.getpwall() if one.pw_gid == group.gr_gid}
    return members <= {owner.pw_uid}


def user(uid: int) -> str:
    """Return a user's name, or the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
