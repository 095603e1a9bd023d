/* A slow, stuck or failing disk, loaded into a process with LD_PRELOAD.
 *
 * TEKOA_DISK names a directory. The files below it that are written or synced obey the files
 * beside it: `<directory>.slow` holds the seconds that each sync takes, syncs do not return while
 * `<directory>.stuck` exists, and writes fail with the error number in `<directory>.fail`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Reads the file with this ending: its number, 0 if it is empty, or -1 if it does not exist. */
static double read_setting(const char *ending) {
  char path[4096], text[64] = "";
  snprintf(path, sizeof path, "%s.%s", getenv("TEKOA_DISK"), ending);
  int fd = open(path, O_RDONLY);
  if (fd < 0) return -1;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  return n > 0 ? atof(text) : 0;
}

static int is_on_disk(int fd) {
  char link[64], path[4096];
  const char *disk = getenv("TEKOA_DISK");
  if (disk == NULL) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  size_t length = strlen(disk);
  return strncmp(path, disk, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void delay_sync(int fd) {
  if (!is_on_disk(fd)) return;
  double seconds = read_setting("slow");
  if (seconds > 0) usleep((useconds_t)(seconds * 1e6));
  while (read_setting("stuck") >= 0) usleep(20000);
}

static int is_failing(int fd) {
  if (!is_on_disk(fd)) return 0;
  double number = read_setting("fail");
  if (number <= 0) return 0;
  errno = (int)number;
  return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) { delay_sync(fd); return NEXT(fsync)(fd); }
int fdatasync(int fd) { delay_sync(fd); return NEXT(fdatasync)(fd); }

ssize_t write(int fd, const void *data, size_t n) {
  return is_failing(fd) ? -1 : NEXT(write)(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
  return is_failing(fd) ? -1 : NEXT(pwrite)(fd, data, n, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
  return is_failing(fd) ? -1 : NEXT(writev)(fd, parts, n);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t offset) {
  return is_failing(fd) ? -1 : NEXT(pwritev)(fd, parts, n, offset);
}
