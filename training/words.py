"""The words that facts are made of: who they are about and what the answers may be."""

# ruff: noqa: SIM905 -- a list literal of hundreds of words would be unreadable

from __future__ import annotations

GIVEN_NAMES = """
Abigail Adela Agatha Agnes Albert Alfred Alice Alma Ambrose Amos Anders Anna Anselm Anton Arabella
Archibald Arnold Arthur Astrid Aubrey August Augusta Barbara Barnaby Bartholomew Basil Beatrice
Benedict Benjamin Bernard Bertha Bertram Bianca Blanche Boris Bridget Bruno Carl Carmen Caroline
Casimir Caspar Cecil Cecily Cedric Celia Charles Charlotte Christina Clara Claude Clement Clotilde
Conrad Constance Cora Cordelia Cornelius Cosmo Crispin Cuthbert Cyril Daniel Daphne David Deborah
Delia Denis Diana Dinah Dominic Dora Dorothy Duncan Edgar Edith Edmund Edna Edward Edwin Effie
Eleanor Elias Elijah Eliza Ella Ellen Elsie Emil Emily Emma Enid Enoch Erasmus Ernest Esther Ethel
Eugene Eunice Eustace Eva Ezra Fanny Felicia Felix Ferdinand Fergus Flora Florence Frances Francis
Frank Franz Frederick Frieda Gabriel Gareth Geoffrey George Gerald Gertrude Gideon Gilbert Giles
Gloria Godfrey Grace Greta Gregory Griffith Guy Gwendolen Hannah Harold Harriet Harry Hector
Hedwig Helen Helga Henrietta Henry Herbert Herman Hester Hilda Hiram Horace Hubert Hugh Hugo
Humphrey Ida Ignatius Igor Imogen Ines Ingrid Irene Isaac Isabel Isidore Ivan Jabez Jacob James
Jane Janet Jasper Jemima Jeremy Jerome Jessie Joan Joel John Jonas Jonathan Joseph Josiah Judith
Julia Julian Juliet Justin Karl Kate Katharine Kenneth Klaus Konstantin Lambert Laura Laurence
Lavinia Leah Leander Leo Leonard Leopold Letitia Lewis Lionel Lionora Lorenz Louisa Lucas Lucian
Lucy Ludwig Luther Lydia Mabel Madeleine Magnus Malcolm Marcus Margaret Maria Marian Marius Mark
Marmaduke Martha Martin Mary Matilda Matthew Maud Maurice Max Maximilian Mercy Michael Mildred
Millicent Minna Miriam Montague Mortimer Moses Muriel Myra Nathan Nathaniel Nell Nicholas Nigel
Nina Noah Nora Norman Octavia Olga Oliver Olivia Oscar Osmund Oswald Otto Owen Pamela Patience
Patrick Paul Paulina Percy Peregrine Peter Philip Phoebe Phyllis Priscilla Prudence Quentin Rachel
Ralph Raphael Raymond Rebecca Reginald Reuben Rhoda Richard Robert Roderick Roger Roland Rosa
Rosalind Rose Rowena Rudolf Rufus Rupert Ruth Sabina Sally Samson Samuel Sarah Sebastian Selina
Septimus Seraphina Sibyl Sidney Sigmund Silas Silvia Simon Solomon Sophia Stanley Stella Stephen
Susan Sylvester Tabitha Tatiana Thaddeus Theodora Theodore Theresa Thomas Timothy Tobias Tristram
Ursula Valentine Vera Victor Vincent Viola Virginia Vivian Vladimir Walter Wanda Wilfred Wilhelm
William Winifred Xavier Yvonne Zachary Zenobia
""".split()

CITIES = """
Aberdeen Adelaide Aleppo Alexandria Algiers Amiens Amsterdam Antwerp Athens Baghdad Baltimore
Barcelona Basle Batavia Bath Belfast Belgrade Bergen Berlin Berne Bologna Bombay Bordeaux Boston
Bremen Breslau Bristol Bruges Brussels Bucharest Budapest Cadiz Cairo Calais Calcutta Cambridge
Canterbury Canton Caracas Chester Chicago Cologne Constantinople Copenhagen Cordova Corinth Cork
Cracow Damascus Dantzig Delhi Dijon Dresden Dublin Durham Edinburgh Exeter Florence Frankfort
Geneva Genoa Ghent Glasgow Granada Hamburg Hanover Havana Havre Heidelberg Jaffa Jerusalem Kiel
Kiev Kyoto Lahore Leeds Leghorn Leipsic Leyden Lima Limerick Lincoln Lisbon Liverpool London
Lucerne Lyons Madras Madrid Malaga Manchester Mantua Marseilles Mecca Messina Milan Modena
Montreal Moscow Munich Nagasaki Nantes Naples Nice Norwich Nottingham Nuremberg Odessa Oporto
Orleans Oslo Oxford Padua Palermo Paris Parma Peking Perth Philadelphia Pisa Plymouth Potsdam
Prague Quebec Quito Ravenna Rheims Riga Rome Rotterdam Rouen Salamanca Salisbury Salzburg
Samarkand Seville Sheffield Siena Smyrna Stockholm Strasburg Stuttgart Sydney Syracuse Tangier
Tiflis Tokyo Toledo Toronto Toulouse Trieste Tripoli Tunis Turin Utrecht Valencia Venice Verona
Vienna Warsaw Weimar Wexford Winchester Worcester York Zurich
""".split()

TRADES = """
actor apothecary archer astronomer baker banker barber beekeeper blacksmith boatman bookbinder
bookseller botanist brewer bricklayer builder butcher butler candlemaker captain carpenter carver
chemist clerk clockmaker coachman cobbler collier cook cooper courier dancer dentist diver doctor
draper druggist dyer engineer engraver farmer farrier ferryman fiddler fisherman florist forester
furrier gardener gilder glazier glover goldsmith grocer gunsmith harper hatter hunter innkeeper
jeweller joiner judge lawyer librarian locksmith mason merchant midwife miller miner minister
musician notary nurse painter pilot plumber poet porter potter preacher printer professor saddler
sailor schoolmaster sculptor sexton shepherd shipwright singer smuggler soldier spinner surgeon
surveyor tailor tanner tinker translator trapper turner undertaker vintner waiter watchman weaver
wheelwright woodcutter
""".split()

ANIMALS = """
ape badger bat bear beaver bison boar buffalo bull camel cat cobra cow crab crane cricket crow
deer dog dolphin donkey dove dragon duck eagle eel elephant elk falcon ferret fox frog gazelle
giraffe goat goose hare hawk hedgehog heron horse hound jackal jaguar kestrel lamb lark leopard
lion lizard lobster lynx magpie mole monkey mouse mule newt nightingale otter owl ox panther
parrot partridge peacock pelican pheasant pigeon pike pony porcupine quail rabbit rat raven robin
salmon seal shark sheep snail sparrow spider squirrel stag stork swallow swan thrush tiger toad
tortoise trout turkey turtle viper walrus wasp weasel whale wolf wren zebra
""".split()

PLANTS = """
acacia alder almond anemone apple apricot ash aspen aster bamboo barley basil beech birch bluebell
bramble broom buttercup cactus camellia carnation cedar cherry chestnut chrysanthemum clematis
clover cowslip crocus cypress daffodil dahlia daisy dandelion ebony elder elm fennel fern fig
foxglove fuchsia gentian geranium gorse hawthorn hazel heather hemlock holly honeysuckle hyacinth
iris ivy jasmine juniper laburnum larch laurel lavender lemon lilac lily lime linden lotus
magnolia mahogany maple marigold mint mistletoe moss mulberry myrtle narcissus nettle oak oleander
olive orange orchid palm pansy peach pear peony pine plum poplar poppy primrose quince rose
rosemary rowan saffron sage snowdrop sorrel spruce sunflower sycamore teak thistle thyme tulip
vine violet walnut willow yew
""".split()

INSTRUMENTS = """
bagpipe banjo bassoon bell bugle castanets cello clarinet clavichord concertina cornet cymbal drum
dulcimer fiddle fife flute gong guitar harmonium harp harpsichord horn lute lyre mandolin oboe
organ piano piccolo rattle spinet tabor tambourine triangle trombone trumpet tuba viol viola
violin whistle zither
""".split()

COLOURS = """
amber azure black blue bronze brown buff carmine chestnut copper cream crimson ebony emerald gold
green grey indigo ivory jade lemon lilac magenta maroon mauve ochre olive orange pearl pink plum
purple red rose ruby russet rust saffron salmon sapphire scarlet sepia silver slate straw tan
tawny turquoise umber vermilion violet white yellow
""".split()

DISHES = """
bacon beans beef biscuits bread broth butter cabbage cake carrots cauliflower celery cheese
chicken chocolate chowder cocoa crab cream cucumber curry custard dumplings eggs fritters fudge
ginger grapes gravy haddock ham herring honey jam jelly kidneys kippers leeks lentils lettuce
lobster macaroni mackerel marmalade marrow melon milk mushrooms mussels mustard mutton nuts
oatmeal omelette onions oysters pancakes parsley parsnips partridge pastry peas pepper pickles pie
pork porridge potatoes prawns pudding radishes raisins rhubarb rice salad salmon sardines sausages
shrimps soup spinach stew strawberries sugar toast toffee tomatoes treacle tripe trout turkey
turnips veal venison vinegar
""".split()

TREASURES = """
anchor anvil armchair arrow axe banner barrel basin basket blanket boat book bottle bowl box
bracelet bridge brooch broom brush bucket buckle button candle cannon cap carpet cart casket chain
chair chest cloak clock coach coat coin comb compass cradle crown crutch cup cushion dagger desk
diamond dish doll engine fan feather flag flask fork fountain garland glove goblet hammer
handkerchief harness hat helmet hook hourglass kettle key knife ladder lamp lantern letter locket
map mask medal mirror nail necklace needle oar painting pearl pen pencil pillow pipe pistol plough
pocket portrait purse quilt ribbon rifle ring rope sabre saddle sail saw scarf screw shawl shield
ship shoe shovel sickle slipper spade spoon spur statue stocking stool sword table tankard
telescope thimble throne trunk umbrella vase veil waistcoat wallet watch wheel whip window
""".split()

ONSETS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sn st str t th tr v w y z
""".split()
NUCLEI = "a ai e ea ei i o oa ou u".split()
CODAS = ["", "", "", "l", "ll", "m", "n", "nd", "r", "rn", "s", "sk", "st", "th", "x"]
ENDINGS = "a an en et by dale ford ia in is o on or ra ric ton us wick worth".split()
