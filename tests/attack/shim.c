/* Stands before the C library's calls on files (LD_PRELOAD), and lets the n-th of them fail, fall short, or be the
 * last one before a signal. Only calls on paths below one folder count, and on descriptors opened there. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FD 4096
enum { COUNT, FAIL, SHORT, BEFORE, AFTER };

static char prefix[4096];
static mode_t umasked;
static int armed, action, value, persistent, changes_only, no_flags, log_fd = -1, data_fd = -1;
static long target, counted;
static char target_call[32];
static unsigned char mine[MAX_FD];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER; /* of the log */

/* The real function, which the dynamic linker finds behind this one. */
#define REAL(type, name, ...)                         \
  static type (*real)(__VA_ARGS__);                   \
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name)

static ssize_t put(int fd, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  return real(fd, data, size);
}

/* Count calls from now on.
 *
 * `folder`: what is below it counts. `what`, `number`, `with`: what happens at which call, with which errno or signal.
 * `lasting`: it happens to all later calls of the same function, too. `changes`: calls that change nothing don't count.
 * `flags`: whether renameat2 works. `log`, `data`: descriptors for what was done, and for the bytes of writes; or -1. */
void attack_arm(const char *folder, int what, long number, int with, int lasting, int changes, int flags, int log,
                int data) {
  snprintf(prefix, sizeof prefix, "%s/", folder);
  memset(mine, 0, sizeof mine);
  umask(umasked = umask(0));
  action = what, target = number, value = with, persistent = lasting, changes_only = changes, no_flags = !flags;
  log_fd = log, data_fd = data, counted = 0, target_call[0] = 0, armed = 1;
}

long attack_counted(void) { return counted; }

static int known(int fd) { return armed && fd >= 0 && fd < MAX_FD && mine[fd]; }

static int below(int at, const char *path) {
  if (!armed || path == NULL) return 0;
  size_t size = strlen(prefix);
  return path[0] == '/' ? strncmp(path, prefix, size) == 0 || strncmp(path, prefix, size - 1) == 0 : known(at);
}

static void mark(int fd, int on) {
  if (fd >= 0 && fd < MAX_FD) mine[fd] = (unsigned char)on;
}

typedef struct {
  int now, after; /* what happens to this call */
} Fate;

static Fate meet(const char *call, int ours, int changes) {
  Fate fate = {COUNT, 0};
  if (!ours || (changes_only && !changes)) return fate;
  long n = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
  if (log_fd >= 0) {
    char line[40];
    put(log_fd, line, (size_t)snprintf(line, sizeof line, "#\t%s\n", call));
  }
  if (n == target) snprintf(target_call, sizeof target_call, "%s", call);
  if (n != target && !(persistent && n > target && target_call[0] && strcmp(call, target_call) == 0)) return fate;
  if (action == BEFORE) raise(value);
  fate.after = action == AFTER;
  if (action == FAIL || action == SHORT) fate.now = action;
  return fate;
}

static void done(Fate fate) {
  int kept = errno;
  if (fate.after) raise(value);
  errno = kept;
}

/* One line: call, result, two descriptors, two numbers, two paths; tabs between them. Lines with # name calls that
 * count, whatever came of them. */
static void note(const char *call, long result, int one, int other, long a, long b, const char *path, const char *more) {
  if (log_fd < 0 || result < 0) return;
  char line[9000];
  int kept = errno;
  int size = snprintf(line, sizeof line, "%s\t%ld\t%d\t%d\t%ld\t%ld\t%s\t%s\n", call, result, one, other, a, b,
                      path ? path : "", more ? more : "");
  put(log_fd, line, (size_t)size);
  errno = kept;
}

#define BEGIN(call, ours, changes)                                           \
  int ours_ = (ours);                                                        \
  Fate fate = meet(call, ours_, changes);                                    \
  if (fate.now == FAIL) {                                                    \
    errno = value;                                                           \
    return -1;                                                               \
  }                                                                          \
  if (ours_ && log_fd >= 0) pthread_mutex_lock(&order)
#define END(call, one, other, a, b, path, more)                              \
  if (ours_) note(call, (long)result, one, other, (long)(a), (long)(b), path, more); \
  if (ours_ && log_fd >= 0) pthread_mutex_unlock(&order);                    \
  done(fate);                                                                \
  return result

/* ---- opening and closing */

#define OPEN(name, ...)                                                      \
  mode_t mode = 0;                                                           \
  if (flags & (O_CREAT | __O_TMPFILE)) {                                     \
    va_list list;                                                            \
    va_start(list, flags);                                                   \
    mode = va_arg(list, mode_t);                                             \
    va_end(list);                                                            \
  }                                                                          \
  BEGIN("open", below(at, path), flags & (O_CREAT | O_TRUNC));               \
  int result = real(__VA_ARGS__);                                            \
  if (result >= 0) mark(result, ours_);                                      \
  END("open", at, -1, flags, mode & ~umasked, path, NULL)

int open(const char *path, int flags, ...) {
  REAL(int, open, const char *, int, ...);
  int at = AT_FDCWD;
  OPEN(open, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  REAL(int, open64, const char *, int, ...);
  int at = AT_FDCWD;
  OPEN(open64, path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
  REAL(int, openat, int, const char *, int, ...);
  OPEN(openat, at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
  REAL(int, openat64, int, const char *, int, ...);
  OPEN(openat64, at, path, flags, mode);
}

/* Whether it fails or not, the descriptor is closed, as on Linux. */
int close(int fd) {
  REAL(int, close, int);
  int ours = known(fd);
  Fate fate = meet("close", ours, 0);
  if (ours) {
    if (log_fd >= 0) pthread_mutex_lock(&order);
    note("close", 0, fd, -1, 0, 0, NULL, NULL);
    if (log_fd >= 0) pthread_mutex_unlock(&order);
  }
  mark(fd, 0);
  int result = real(fd);
  if (fate.now == FAIL) errno = value, result = -1;
  done(fate);
  return result;
}

static int duplicated(const char *call, int fd, int result) {
  if (known(fd) && result >= 0) {
    mark(result, 1);
    if (log_fd >= 0) pthread_mutex_lock(&order);
    note(call, result, fd, -1, 0, 0, NULL, NULL);
    if (log_fd >= 0) pthread_mutex_unlock(&order);
  }
  return result;
}
#define FCNTL(name)                                                          \
  int name(int fd, int command, ...) {                                       \
    REAL(int, name, int, int, ...);                                          \
    va_list list;                                                            \
    va_start(list, command);                                                 \
    long argument = va_arg(list, long);                                      \
    va_end(list);                                                            \
    if (command != F_DUPFD_CLOEXEC && command != F_DUPFD) return real(fd, command, argument); \
    if (meet("dup", known(fd), 0).now == FAIL) {                             \
      errno = value;                                                         \
      return -1;                                                             \
    }                                                                        \
    return duplicated("dup", fd, real(fd, command, argument));               \
  }
FCNTL(fcntl)
FCNTL(fcntl64)
int dup(int fd) {
  REAL(int, dup, int);
  if (meet("dup", known(fd), 0).now == FAIL) {
    errno = value;
    return -1;
  }
  return duplicated("dup", fd, real(fd));
}

/* ---- directories that are listed */

DIR *opendir(const char *path) {
  REAL(DIR *, opendir, const char *);
  int ours = below(AT_FDCWD, path);
  if (meet("opendir", ours, 0).now == FAIL) {
    errno = value;
    return NULL;
  }
  DIR *result = real(path);
  if (result != NULL) mark(dirfd(result), ours);
  return result;
}
DIR *fdopendir(int fd) {
  REAL(DIR *, fdopendir, int);
  if (meet("opendir", known(fd), 0).now == FAIL) {
    errno = value;
    return NULL;
  }
  return real(fd);
}
int closedir(DIR *folder) {
  REAL(int, closedir, DIR *);
  mark(dirfd(folder), 0);
  return real(folder);
}
struct dirent64 *readdir64(DIR *folder) {
  REAL(struct dirent64 *, readdir64, DIR *);
  if (meet("readdir", known(dirfd(folder)), 0).now == FAIL) {
    errno = value;
    return NULL;
  }
  return real(folder);
}

/* ---- bytes */

static struct iovec halved(const struct iovec *buffers, int count) {
  for (int i = 0; i < count; i++)
    if (buffers[i].iov_len) return (struct iovec){buffers[i].iov_base, (buffers[i].iov_len + 1) / 2};
  return (struct iovec){NULL, 0};
}

static void note_write(int fd, long offset, long result, const struct iovec *buffers, int count) {
  if (log_fd < 0 || result < 0) return;
  if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - result; /* of write: where it began */
  note("write", result, fd, -1, offset, result, NULL, NULL);
  for (int i = 0; i < count && result > 0; i++) {
    size_t size = (size_t)result < buffers[i].iov_len ? (size_t)result : buffers[i].iov_len;
    put(data_fd, buffers[i].iov_base, size);
    result -= (long)size;
  }
}

/* `pass` makes the call, given the buffers `at`, `n` of them. */
#define TRANSFER(call, changes, offset, list, length, pass)                  \
  const struct iovec *at = (list);                                           \
  int n = (length);                                                          \
  BEGIN(call, known(fd), changes);                                           \
  struct iovec half = halved(at, n);                                         \
  if (fate.now == SHORT && n) at = &half, n = 1;                             \
  ssize_t result = (pass);                                                   \
  if (ours_ && (changes)) note_write(fd, (long)(offset), result, at, n);     \
  if (ours_ && log_fd >= 0) pthread_mutex_unlock(&order);                    \
  done(fate);                                                                \
  return result

ssize_t write(int fd, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  struct iovec one = {(void *)data, size};
  TRANSFER("write", 1, -1, &one, 1, real(fd, at->iov_base, at->iov_len));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
  struct iovec one = {(void *)data, size};
  TRANSFER("pwrite", 1, offset, &one, 1, real(fd, at->iov_base, at->iov_len, offset));
}
ssize_t pwritev64v2(int fd, const struct iovec *list, int count, off64_t offset, int flags) {
  REAL(ssize_t, pwritev64v2, int, const struct iovec *, int, off64_t, int);
  TRANSFER("pwrite", 1, offset, list, count, real(fd, at, n, offset, flags));
}
ssize_t pwritev64(int fd, const struct iovec *list, int count, off64_t offset) {
  REAL(ssize_t, pwritev64, int, const struct iovec *, int, off64_t);
  TRANSFER("pwrite", 1, offset, list, count, real(fd, at, n, offset));
}
ssize_t read(int fd, void *data, size_t size) {
  REAL(ssize_t, read, int, void *, size_t);
  struct iovec one = {data, size};
  TRANSFER("read", 0, -1, &one, 1, real(fd, at->iov_base, at->iov_len));
}
ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
  REAL(ssize_t, pread64, int, void *, size_t, off64_t);
  struct iovec one = {data, size};
  TRANSFER("pread", 0, -1, &one, 1, real(fd, at->iov_base, at->iov_len, offset));
}
ssize_t preadv64v2(int fd, const struct iovec *list, int count, off64_t offset, int flags) {
  REAL(ssize_t, preadv64v2, int, const struct iovec *, int, off64_t, int);
  TRANSFER("pread", 0, -1, list, count, real(fd, at, n, offset, flags));
}
ssize_t preadv64(int fd, const struct iovec *list, int count, off64_t offset) {
  REAL(ssize_t, preadv64, int, const struct iovec *, int, off64_t);
  TRANSFER("pread", 0, -1, list, count, real(fd, at, n, offset));
}

/* ---- descriptors: signature, arguments, and what is noted of them */

#define ON_FD(name, call, changes, parameters, arguments, number)            \
  int name parameters {                                                      \
    static int(*real) parameters;                                            \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name);             \
    BEGIN(call, known(fd), changes);                                         \
    int result = real arguments;                                             \
    END(call, fd, -1, number, 0, NULL, NULL);                                \
  }
ON_FD(fsync, "fsync", 1, (int fd), (fd), 0)
ON_FD(fdatasync, "fsync", 1, (int fd), (fd), 0)
ON_FD(ftruncate64, "ftruncate", 1, (int fd, off64_t size), (fd, size), size)
ON_FD(fchmod, "fchmod", 1, (int fd, mode_t mode), (fd, mode), mode)
ON_FD(flock, "flock", 0, (int fd, int how), (fd, how), 0)
ON_FD(fstat, "fstat", 0, (int fd, struct stat *info), (fd, info), 0)
ON_FD(fstat64, "fstat", 0, (int fd, struct stat64 *info), (fd, info), 0)

/* ---- paths */

#define ON_PATH(name, call, changes, at, path, number, parameters, arguments) \
  int name parameters {                                                      \
    static int(*real) parameters;                                            \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name);             \
    BEGIN(call, below(at, path), changes);                                   \
    int result = real arguments;                                             \
    END(call, at, -1, number, 0, path, NULL);                                \
  }
ON_PATH(stat, "stat", 0, AT_FDCWD, path, 0, (const char *path, struct stat *info), (path, info))
ON_PATH(stat64, "stat", 0, AT_FDCWD, path, 0, (const char *path, struct stat64 *info), (path, info))
ON_PATH(lstat, "stat", 0, AT_FDCWD, path, 0, (const char *path, struct stat *info), (path, info))
ON_PATH(lstat64, "stat", 0, AT_FDCWD, path, 0, (const char *path, struct stat64 *info), (path, info))
ON_PATH(fstatat, "stat", 0, at, path, 0, (int at, const char *path, struct stat *info, int flags),
        (at, path, info, flags))
ON_PATH(fstatat64, "stat", 0, at, path, 0, (int at, const char *path, struct stat64 *info, int flags),
        (at, path, info, flags))
ON_PATH(mkdir, "mkdir", 1, AT_FDCWD, path, mode & ~umasked, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, "mkdir", 1, at, path, mode & ~umasked, (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(rmdir, "rmdir", 1, AT_FDCWD, path, 0, (const char *path), (path))
ON_PATH(unlink, "unlink", 1, AT_FDCWD, path, 0, (const char *path), (path))
ON_PATH(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", 1, at, path, 0, (int at, const char *path, int flags),
        (at, path, flags))
ON_PATH(chmod, "chmod", 1, AT_FDCWD, path, mode, (const char *path, mode_t mode), (path, mode))
ON_PATH(fchmodat, "chmod", 1, at, path, mode, (int at, const char *path, mode_t mode, int flags),
        (at, path, mode, flags))

#define ON_TWO(name, call, from_at, from, to_at, to, number, parameters, arguments) \
  int name parameters {                                                      \
    static int(*real) parameters;                                            \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name);             \
    BEGIN(call, below(to_at, to), 1);                                        \
    int result = real arguments;                                             \
    END(call, from_at, to_at, number, 0, from, to);                          \
  }
ON_TWO(rename, "rename", AT_FDCWD, from, AT_FDCWD, to, 0, (const char *from, const char *to), (from, to))
ON_TWO(renameat, "rename", here, from, there, to, 0, (int here, const char *from, int there, const char *to),
       (here, from, there, to))
ON_TWO(link, "link", AT_FDCWD, from, AT_FDCWD, to, 0, (const char *from, const char *to), (from, to))
ON_TWO(linkat, "link", here, from, there, to, 0, (int here, const char *from, int there, const char *to, int flags),
       (here, from, there, to, flags))
ON_TWO(symlink, "symlink", AT_FDCWD, from, AT_FDCWD, to, 0, (const char *from, const char *to), (from, to))
ON_TWO(symlinkat, "symlink", AT_FDCWD, from, there, to, 0, (const char *from, int there, const char *to),
       (from, there, to))

int renameat2(int here, const char *from, int there, const char *to, unsigned flags) {
  REAL(int, renameat2, int, const char *, int, const char *, unsigned);
  if (armed && no_flags) {
    errno = ENOSYS;
    return -1;
  }
  BEGIN("renameat2", below(there, to), 1);
  int result = real(here, from, there, to, flags);
  END("renameat2", here, there, flags, 0, from, to);
}
