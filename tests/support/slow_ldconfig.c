/* In the place of the host's ldconfig: waits, so that it can be looked at while it runs.  Static. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void) {
    int word = 0;
    syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0);
    return 0;
}
