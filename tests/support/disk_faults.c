// Preloaded into a daemon: makes its reads and writes of disk fail, or take long, as files in
// $DISK_FAULTS say: hang-read, slow-read (0.2 s), fail-read (EIO), and the same of write; full-write
// (ENOSPC), fail-remove (EROFS), full-rename (ENOSPC), and slow-header (50 ms).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_on(const char *fault, const char *of) {
  char path[4096];
  const char *directory = getenv("DISK_FAULTS");
  snprintf(path, sizeof path, "%s/%s-%s", directory ? directory : "/nowhere", fault, of);
  return access(path, F_OK) == 0;
}

static int fails(const char *of) {
  while (is_on("hang", of)) usleep(10000);
  if (is_on("slow", of)) usleep(200000);
  errno = is_on("full", of) ? ENOSPC : is_on("fail", of) ? EIO : 0;
  return errno != 0;
}

#define FAULTY(name, of, parameters, arguments)                \
  ssize_t name parameters {                                    \
    ssize_t(*real) parameters;                                 \
    *(void **)&real = dlsym(RTLD_NEXT, #name);                 \
    return fails(of) ? -1 : real arguments;                    \
  }
#define PLAIN (int fd, const struct iovec *pieces, int count, off_t at), (fd, pieces, count, at)
#define FLAGGED \
  (int fd, const struct iovec *pieces, int count, off_t at, int flags), (fd, pieces, count, at, flags)
#define EXPANDED(...) FAULTY(__VA_ARGS__)

EXPANDED(preadv, "read", PLAIN)
EXPANDED(preadv64, "read", PLAIN)
EXPANDED(preadv2, "read", FLAGGED)
EXPANDED(preadv64v2, "read", FLAGGED)
EXPANDED(pwritev, "write", PLAIN)
EXPANDED(pwritev64, "write", PLAIN)
EXPANDED(pwritev2, "write", FLAGGED)
EXPANDED(pwritev64v2, "write", FLAGGED)

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
  int (*real)(int, const char *, int, const char *);
  *(void **)&real = dlsym(RTLD_NEXT, "renameat");
  if (strstr(to, ".entry") && is_on("full", "rename")) {
    errno = ENOSPC;
    return -1;
  }
  return real(from_fd, from, to_fd, to);
}

ssize_t pread64(int fd, void *to, size_t nbytes, off_t at) {
  ssize_t (*real)(int, void *, size_t, off_t);
  *(void **)&real = dlsym(RTLD_NEXT, "pread64");
  if (nbytes == 4096 && is_on("slow", "header")) usleep(50000);
  return real(fd, to, nbytes, at);
}

int unlinkat(int fd, const char *path, int flags) {
  int (*real)(int, const char *, int);
  *(void **)&real = dlsym(RTLD_NEXT, "unlinkat");
  const char *suffix = strrchr(path, '.');
  if (suffix && !strcmp(suffix, ".entry") && is_on("fail", "remove")) {
    errno = EROFS;
    return -1;
  }
  return real(fd, path, flags);
}
