/* The options of pyxis that launch/slurm.sh gives, as a plugin that Slurm itself loads (SPANK): a step
 * that has them runs in its --container-workdir and leaves a line there, "image workdir mounts", for
 * every task. There is no container: that is the business of pyxis and enroot.
 *
 *     cc -shared -fPIC -DSLURM=0x160508 -o container.so container_options.c    # Slurm 22.5.8
 *
 * What slurm/spank.h would declare is declared here, so that no headers of Slurm are needed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, val;
    int (*callback)(int val, const char *value, int remote);
};

const char plugin_name[] = "container_options", plugin_type[] = "spank";
const unsigned int plugin_version = SLURM;

static char *given[3];

static int remember(int val, const char *value, int remote) {
    (void)remote;
    given[val] = strdup(value);
    return given[val] == NULL;
}

struct spank_option spank_options[] = {
    {"container-image", "NAME", "the image of the step", 1, 0, remember},
    {"container-workdir", "PATH", "its directory", 1, 1, remember},
    {"container-mounts", "SRC:DST", "what of the node is seen in it", 1, 2, remember},
    {NULL, NULL, NULL, 0, 0, NULL},
};

/* In every task, as its user, before it begins. */
int slurm_spank_task_init(void *step, int count, char **words) {
    (void)step, (void)count, (void)words;
    if (given[0] == NULL) return 0;
    if (given[1] == NULL || given[2] == NULL || chdir(given[1]) != 0) return -1;
    FILE *file = fopen("containers", "a");
    if (file == NULL) return -1;
    fprintf(file, "%s %s %s\n", given[0], given[1], given[2]);
    return fclose(file);
}
